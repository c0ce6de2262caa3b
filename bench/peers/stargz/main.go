// stargz-snapshotter as a proxy plugin of containerd: Debian has its client only, and its own daemon is in a module that cannot be fetched.
//
//	stargz-snapshotter ROOT SOCKET
package main

import (
	"context"
	"log"
	"net"
	"os"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/stargz-snapshotter/service"
	"google.golang.org/grpc"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: stargz-snapshotter ROOT SOCKET")
	}
	snapshotter, err := service.NewStargzSnapshotterService(context.Background(), os.Args[1], &service.Config{})
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(snapshotter))
	listener, err := net.Listen("unix", os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(server.Serve(listener))
}
