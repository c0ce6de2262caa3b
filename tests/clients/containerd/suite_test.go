// Runs containerd's own test suite for snapshotters with ferry-snapshotter, by containerd's own client.
package containerd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// start runs the program that SNAPSHOTTER names on a root, with what IMAGES sets.
func start(_ context.Context, root string) (snapshots.Snapshotter, func() error, error) {
	directory := filepath.Dir(root)
	socket, config := filepath.Join(directory, "s"), filepath.Join(directory, "config.toml")
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
		for _, name := range []string{"layer", "merged"} {
			images, _ := filepath.Glob(filepath.Join(root, "snapshots", "*", name))
			for _, image := range images {
				syscall.Unmount(image, syscall.MNT_DETACH)
			}
		}
		return errors.Join(connection.Close(), server.Process.Signal(syscall.SIGTERM), server.Wait())
	}
	return proxy.NewSnapshotter(api.NewSnapshotsClient(connection), "ferry"), stop, nil
}

func TestSuite(t *testing.T) {
	// The name decides what is asked of renamed directories, which overlayfs may refuse.
	testsuite.SnapshotterSuite(t, "overlayfs", start)
}

// A container with users of its own, whether layers are directories or images.
func TestIDMap(t *testing.T) {
	directory, context := t.TempDir(), context.Background()
	snapshotter, stop, err := start(context, filepath.Join(directory, "root"))
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	target := filepath.Join(directory, "at")
	if err := os.Mkdir(target, 0o755); err != nil {
		t.Fatal(err)
	}
	with := func(mounts []mount.Mount, err error, do func() error) {
		t.Helper()
		if err == nil {
			err = mount.All(mounts, target)
		}
		if err == nil {
			err = errors.Join(do(), mount.UnmountAll(target, 0))
		}
		if err != nil {
			t.Fatal(mounts, err)
		}
	}
	parent := ""
	for _, name := range []string{"one", "two"} {
		mounts, err := snapshotter.Prepare(context, name+"-key", parent)
		with(mounts, err, func() error {
			path := filepath.Join(target, name)
			return errors.Join(os.WriteFile(path, []byte(name), 0o644), os.Chown(path, 5, 6))
		})
		if err := snapshotter.Commit(context, name, name+"-key"); err != nil {
			t.Fatal(err)
		}
		parent = name
	}
	labels := snapshots.WithLabels(map[string]string{
		snapshots.LabelSnapshotUIDMapping: "0:100000:65536",
		snapshots.LabelSnapshotGIDMapping: "0:200000:65536",
	})
	owner := func(name string, uid, gid uint32) error {
		var found syscall.Stat_t
		err := syscall.Stat(filepath.Join(target, name), &found)
		if err == nil && (found.Uid != uid || found.Gid != gid) {
			err = fmt.Errorf("%s belongs to %d:%d, not %d:%d", name, found.Uid, found.Gid, uid, gid)
		}
		return err
	}
	mounts, err := snapshotter.Prepare(context, "container", "two", labels)
	with(mounts, err, func() error {
		return errors.Join(owner(".", 100000, 200000), owner("one", 100005, 200006), owner("two", 100005, 200006))
	})
	mounts, err = snapshotter.View(context, "view", "two", labels)
	with(mounts, err, func() error {
		return errors.Join(owner(".", 100000, 200000), owner("one", 100005, 200006))
	})
	for _, key := range []string{"container", "view"} {
		if err := snapshotter.Remove(context, key); err != nil {
			t.Fatal(err)
		}
	}
}
