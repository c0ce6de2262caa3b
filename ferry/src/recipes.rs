//! Commands to copy: VMMs and guests that use a share.

/// Shown by `ferry --help`.
pub const OVERVIEW: &str = "\
Examples:
  ferry try ~/project                      a shell in a Linux guest, in ~/project
  ferry try ~/project -- make test         run a command there, and exit with its status
  ferry share ~/project --virtiofs /run/user/1000/project.sock
                                           share it with a virtual machine of your own
  ferry disk disk.raw --vhost-user /run/disk.sock
                                           a disk for a virtual machine
  ferry mount mem /mnt -o size=1G          a memory file system on this host
  ferry image build rootfs -o rootfs.img --store store
                                           a verified image of a tree, for ferry image mount
  ferry log /mnt requests --follow         watch every request of it

ferry share --help has the lines to copy for QEMU, libvirt, cloud-hypervisor and
the guest, ferry mount --help those for fstab.";

/// Shown by `ferry try --help`.
pub const TRY: &str = "\
Examples:
  ferry try .                              a shell in a guest, in this directory
  ferry try . -- sh -c 'uname -r; ls'      run a command, and exit with its status
  ferry try --read-only src build          /mnt/src and /mnt/build, both read-only
  ferry try --memory 2G . -- ./test.sh     more memory for a bigger job";

/// Shown by `ferry share --help`.
pub const SHARE: &str = "\
Examples:
  ferry share /srv/src --virtiofs /run/src.sock /srv/doc --virtiofs /run/doc.sock --read-only
  ferry share mem --size 1G --virtiofs /run/mem.sock --mount /mnt
                                           one memory file system, for a guest and on this host

QEMU (the guest's memory must be shared; 4G is an example):
  -object memory-backend-memfd,id=mem,size=4G,share=on -numa node,memdev=mem
  -chardev socket,id=char0,path=/run/src.sock
  -device vhost-user-fs-pci,chardev=char0,tag=src,queue-size=1024,num-request-queues=4

QEMU from 11.1 on with a DAX window, for large files that the guest maps into its own memory (num_vqs is the
number of queues plus 1; the tag is ferry's), and in the guest:
  ferry share /srv/src --virtiofs /run/src.sock --tag src --queues 4
  -device vhost-user-test-device-pci,chardev=char0,virtio-id=26,num_vqs=5,vq_size=1024,config_size=40
  mount -t virtiofs src /mnt               (or with -o dax=always: all files)

libvirt (in the domain's XML):
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <devices>
    <filesystem type='mount'>
      <driver type='virtiofs' queue='1024'/>
      <source socket='/run/src.sock'/>
      <target dir='src'/>
    </filesystem>
  </devices>

cloud-hypervisor:
  --memory size=4G,shared=on --fs tag=src,socket=/run/src.sock,num_queues=4,queue_size=1024

9P, for systems without vhost-user (only its user can connect to a unix socket; TCP from other
machines needs --9p-remote, or tls: with --tls-client-ca):
  ferry share /srv/src --9p unix:/run/src.9p
  ferry share /srv/src --9p tcp:127.0.0.1:5640
  mount -t 9p -o trans=unix,version=9p2000.L,msize=1048576 /run/src.9p /mnt
  mount -t 9p -o trans=tcp,port=5640,version=9p2000.L,msize=1048576 127.0.0.1 /mnt

9P for a virtual machine (QEMU from 11.1 on, its memory shared as above; config_size is the
length of the tag plus 2), and in the guest:
  ferry share /srv/src --9p vhost-user:/run/src.sock --tag src
  -chardev socket,id=char0,path=/run/src.sock
  -device vhost-user-test-device-pci,chardev=char0,virtio-id=9,num_vqs=1,vq_size=128,config_size=5
  mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 src /mnt

In the guest:
  mount -t virtiofs src /mnt
or in its /etc/fstab:
  src  /mnt  virtiofs  defaults,nofail  0  0

A configuration file for --config (paths are relative to the file):
  [[share]]
  source = \"/srv/src\"
  virtiofs = \"/run/src.sock\"
  read-only = true
  [[disk]]
  file = \"/srv/disk.raw\"
  vhost-user = \"/run/disk.sock\"";

/// Shown by `ferry share --help`, too. TLS requires certificates of X.509 version 3.
pub const TLS: &str = "\
9P with TLS: an authority of your own, and the certificates that it signs. HOST is the name that clients
use (for an address, write IP:ADDRESS instead of DNS:HOST); each client has its own key:
  openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -subj '/CN=our authority' \\
    -keyout ca.key -out ca.pem
  openssl req -newkey rsa:2048 -nodes -subj /CN=HOST -addext subjectAltName=DNS:HOST \\
    -keyout server.key -out server.csr
  openssl req -newkey rsa:2048 -nodes -subj /CN=me -addext extendedKeyUsage=clientAuth \\
    -keyout me.key -out me.csr
  for NAME in server me; do
    openssl x509 -req -in $NAME.csr -CA ca.pem -CAkey ca.key -CAcreateserial \\
      -copy_extensions copy -days 365 -out $NAME.pem
  done
  ferry share /srv/src --9p tls:0.0.0.0:564 --tls-cert server.pem --tls-key server.key \\
    --tls-client-ca ca.pem
  ferry mount 9p:tls:HOST:564 /mnt --server-ca ca.pem --client-cert me.pem --client-key me.key";

/// Shown by `ferry mount --help`.
pub const MOUNT: &str = "\
Examples:
  ferry mount mem /mnt --size 1G           a memory file system, gone when it is unmounted
  ferry mount pmem:/srv/data.pmem /mnt --size 8G
                                           one that stays, in a file, which is made
  ferry mount /srv/src /mnt --read-only    a directory of this host
  ferry mount mem --explain                which paths there are here, and how to
                                           turn on better ones
  ferry mount /mnt --explain               which paths that mount has
  umount /mnt                              ends the server, too; for users:
  fusermount3 -u /mnt

For mount(8) and fstab, once:
  ln -s $(command -v ferry) /sbin/mount.ferry
  ln -s $(command -v ferry) /sbin/mount.fuse.ferry
then:
  mount -t ferry pmem:/srv/data.pmem /mnt -o size=8G,allow_other
  mount -o remount,ro /mnt                 rw as well, and nosuid, noatime and the like
or in /etc/fstab:
  pmem:/srv/data.pmem  /mnt  ferry  size=8G,allow_other,nofail  0  0

The best path needs this as root, until the next boot:
  echo Y > /sys/module/fuse/parameters/enable_uring
and at each boot:
  echo options fuse enable_uring=1 > /etc/modprobe.d/ferry.conf";

/// Shown by `ferry log --help`.
pub const LOG: &str = "\
Examples:
  ferry log                                all shares and mounts of yours that run
  ferry log /mnt                           what is served there, and what is logged
  ferry log /mnt requests --follow         every request with its outcome and time, until Ctrl-C
  ferry log /mnt/some/file requests -f     those about one file, in a mount or in a shared directory
  ferry log /run/src.sock debug            a share for virtual machines, at another level
  ferry log /run/src.sock default          as it was started";

/// Shown by `ferry set --help`.
pub const SET: &str = "\
Examples:
  ferry set /run/src.sock limit=iops=2000,bps=100M      from now on, at most this much per second
  ferry set /run/src.sock limit=none                    as much as the machine gives
  ferry set /run/disk.sock limit=bps=20M log=debug      a disk; both are changed, or nothing
  ferry set /mnt log=debug                              as ferry log /mnt debug";

/// Shown by `ferry add --help`.
pub const ADD: &str = "\
Examples:
  ferry add /run/src.sock share /srv/new --virtiofs /run/new.sock     beside what serves /run/src.sock
  ferry add 1234 disk /srv/new.raw --vhost-user /run/disk2.sock       a disk, to process 1234";

/// Shown by `ferry remove --help`.
pub const REMOVE: &str = "\
Examples:
  ferry remove /run/new.sock               unless a guest is connected
  ferry remove /mnt --force                a mount, also with open files";

/// Shown by `ferry reload --help`.
pub const RELOAD: &str = "\
Examples:
  ferry reload /run/src.sock               after a change of the file of ferry share --config
  systemctl reload ferry-share@NAME        the same, for a unit

SIGHUP reloads nothing: it ends ferry, unless it is ignored (nohup).";

/// Shown by `ferry status --help`.
pub const STATUS: &str = "\
Examples:
  ferry status                             all shares, mounts and disks of yours that run
  ferry status /mnt                        what serves /mnt, by which path, and why by no better one
  ferry status --json                      for a script";

/// Shown by `ferry metrics --help`.
pub const METRICS: &str = "\
Examples:
  ferry metrics                            all shares, mounts and disks of yours that run, in OpenMetrics text
  ferry metrics /mnt                       those of the server of /mnt
  ferry metrics --format prometheus | promtool check metrics
  ferry share /srv --virtiofs /run/s.sock --metrics 127.0.0.1:9100      curl http://127.0.0.1:9100/metrics";

/// Shown by `ferry top --help`.
pub const TOP: &str = "\
Examples:
  ferry top                                all shares, mounts and disks of yours that run, until Ctrl-C
  ferry top /mnt --interval 5              what the server of /mnt does in five seconds
  ferry top --once --json                  one second, for a script";

/// Shown by `ferry doctor --help`.
pub const DOCTOR: &str = "\
Examples:
  ferry doctor                             all exports
  ferry doctor --for virtiofs,disk         what virtual machines need
  ferry doctor --for mount --json          for a script, which looks at the status, too";

/// Shown by `ferry agent --help`.
pub const AGENT: &str = "\
Examples:
  ferry agent /mnt/work                    one share
  ferry agent /mnt/work /mnt/home          several
  ferry agent --wait /mnt/work             also before it is mounted, and when it is mounted again";

/// Shown by `ferry fsck --help`.
pub const FSCK: &str = "\
Examples:
  ferry fsck /srv/data.pmem                look, and change nothing
  ferry fsck /srv/data.pmem --repair       keep what can be read
  ferry fsck /dev/pmem0 --tier2 /srv/cold  one that was mounted with --tier2";

/// Returns QEMU's options for one share, to append to a command with shared memory.
pub fn qemu(socket: &str, tag: &str, queues: usize) -> String {
    let socket = qemu_value(socket);
    let tag = qemu_value(tag);
    let line = [
        format!("socket,id=ferry,path={socket}"),
        format!("vhost-user-fs-pci,chardev=ferry,tag={tag},queue-size=1024,num-request-queues={queues}"),
    ];
    format!("-chardev {} -device {}", shell_word(&line[0]), shell_word(&line[1]))
}

/// Returns QEMU's options for one 9P device, to append to a command with shared memory. The configuration space holds the tag and
/// its length.
pub fn qemu_9p(socket: &str, tag: &str) -> String {
    let socket = format!("socket,id=ferry9p,path={}", qemu_value(socket));
    let bytes = 2 + tag.len();
    let device =
        format!("vhost-user-test-device-pci,chardev=ferry9p,virtio-id=9,num_vqs=1,vq_size=128,config_size={bytes}");
    format!("-chardev {} -device {device}", shell_word(&socket))
}

/// Returns QEMU's options for one disk, to append to a command with shared memory.
pub fn qemu_disk(socket: &str) -> String {
    let socket = format!("socket,id=ferry,path={},reconnect-ms=1000", qemu_value(socket));
    format!("-chardev {} -device vhost-user-blk-pci,chardev=ferry", shell_word(&socket))
}

/// Escapes a value in a QEMU option: commas are doubled.
fn qemu_value(text: &str) -> String {
    text.replace(',', ",,")
}

/// Quotes a word for a shell, if needed.
pub fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:@%+".contains(c);
    if !text.is_empty() && text.chars().all(plain) { text.into() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_survive_shell_and_qemu() {
        assert_eq!(
            qemu("/run/a,b.sock", "my tag", 2),
            "-chardev socket,id=ferry,path=/run/a,,b.sock -device 'vhost-user-fs-pci,chardev=ferry,tag=my tag,\
             queue-size=1024,num-request-queues=2'"
        );
        assert_eq!(
            qemu_9p("/run/s", "src"),
            "-chardev socket,id=ferry9p,path=/run/s -device vhost-user-test-device-pci,chardev=ferry9p,virtio-id=9,\
             num_vqs=1,vq_size=128,config_size=5"
        );
        assert_eq!(shell_word("it's"), r"'it'\''s'");
    }
}
