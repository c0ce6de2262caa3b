// Runs containerd's own test suite for snapshotters with ferry-snapshotter, by containerd's own client.
package containerd

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// start runs the program that SNAPSHOTTER names on a root, with what IMAGES sets.
func start(_ context.Context, root string) (snapshots.Snapshotter, func() error, error) {
	folder := filepath.Dir(root)
	socket, config := filepath.Join(folder, "s"), filepath.Join(folder, "config.toml")
	if err := os.WriteFile(config, []byte("images = \""+os.Getenv("IMAGES")+"\"\n"), 0o600); err != nil {
		return nil, nil, err
	}
	server := exec.Command(os.Getenv("SNAPSHOTTER"), "--config", config, "--root", root, "--address", socket)
	server.Stderr = os.Stderr
	if err := server.Start(); err != nil {
		return nil, nil, err
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if connection, err := net.Dial("unix", socket); err == nil {
			connection.Close()
			break
		} else if time.Now().After(end) {
			return nil, nil, err
		}
	}
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	stop := func() error {
		layers, err := filepath.Glob(filepath.Join(root, "snapshots", "*", "layer"))
		for _, layer := range layers {
			syscall.Unmount(layer, syscall.MNT_DETACH)
		}
		return errors.Join(err, connection.Close(), server.Process.Signal(syscall.SIGTERM), server.Wait())
	}
	return proxy.NewSnapshotter(api.NewSnapshotsClient(connection), "ferry"), stop, nil
}

func TestSuite(t *testing.T) {
	// The name decides what is asked of renamed directories, which overlayfs may refuse.
	testsuite.SnapshotterSuite(t, "overlayfs", start)
}
