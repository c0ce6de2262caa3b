//! 9P by links that are not a plain network: vsock, and one that loses and delays. Server, link and client are all in one
//! User-mode Linux guest, whose kernel has what a host's may lack; nothing of the host is changed.

use std::time::Duration;

use ferry_tests::mounts::program;
use ferry_tests::ninep::TREE;
use ferry_tests::{Guest, GuestCache, GuestResult, Input, Output, TIMEOUT, run};

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// Loads modules, and has `serve` start the program and wait until it serves.
const SETUP: &str = r#"
modules=$1 ferry=$2 probe=$3 seconds=$4
load() { for module in "$@"; do /run/ferry/busybox insmod $modules/kernel/$module.ko; done; }
load fs/netfs/netfs net/9p/9pnet net/9p/9pnet_fd fs/9p/9p
serve() {
    mkfifo /tmp/up
    "$@" --json >/tmp/up & server=$!
    read up </tmp/up
}
mkdir -p /dev/shm/shared /mnt/p /mnt/own
chmod 700 /run/ferry
"#;

/// A guest that runs a script after [`SETUP`].
fn guest(script: &str, seconds: u64) -> GuestResult {
    let cache = GuestCache::from_env().unwrap();
    let modules = cache.uml().unwrap().modules.canonicalize().unwrap();
    let text = format!("{SETUP}\n{script}");
    let words = ["sh", "-euc", &text, "sh", modules.to_str().unwrap(), program().to_str().unwrap(), PROBE];
    let mut guest = Guest::new(cache, words.into_iter().chain([&*seconds.to_string()]));
    guest.stdin = Input::Null;
    guest.stdout = Output::Piped;
    guest.stderr = Output::Piped;
    run(guest, TIMEOUT + 3 * Duration::from_secs(seconds))
}

/// Linux's client has no vsock of its own: it is handed a connection.
const BY_VSOCK: &str = r#"
load net/vmw_vsock/vsock net/vmw_vsock/vmw_vsock_virtio_transport_common net/vmw_vsock/vsock_loopback
serve $ferry share /dev/shm/shared --9p vsock:any:5640
echo "$up" | grep -q '"9p":"vsock:any:5640"'
$probe --role vsock 1 5640 mount -i -t 9p -o trans=fd,rfdno=SOCKET,wfdno=SOCKET,version=9p2000.L,msize=262144 x /mnt/p
head -c 3000000 /dev/urandom >/dev/shm/shared/host
cp /mnt/p/host /mnt/p/guest
cmp /dev/shm/shared/host /mnt/p/guest
cmp /dev/shm/shared/host /dev/shm/shared/guest
umount /mnt/p
# Our client has one.
timeout 60 $ferry mount 9p:vsock:1:5640 /mnt/own
cmp /dev/shm/shared/host /mnt/own/guest
cp /mnt/own/host /mnt/own/again
cmp /dev/shm/shared/host /dev/shm/shared/again
umount /mnt/own
kill $server
wait $server
if $ferry share mem --9p vsock:77:5640 2>/tmp/why; then exit 1; fi
grep -q '77 is not a CID of this machine' /tmp/why
"#;

#[test]
fn vsock_carries_a_mount() {
    guest(BY_VSOCK, 0).ok();
}

/// Linux's client at our own unix socket, in every cache mode: a tree goes in and out, and is the same on both sides.
const BY_UNIX: &str = r#"
serve $ferry share /dev/shm/shared --9p unix:/tmp/9p.sock
test "$(stat -c %a /tmp/9p.sock)" = 600
mkdir -p /mnt/share
cd /dev/shm/shared
mkdir host
printf small >host/small
: >host/empty
head -c 100001 /dev/urandom >host/odd
head -c 5000000 /dev/urandom >host/large
ln -s '../over there' host/link
ln host/odd host/odd2
for number in $(seq 0 199); do printf $number >host/n$number; done
for options in msize=1048576,cache=none,posixacl msize=65536,cache=readahead msize=131072,cache=mmap \
    msize=1048576,cache=loose,posixacl; do
    mount -i -t 9p -o trans=unix,version=9p2000.L,$options /tmp/9p.sock /mnt/share
    grep -q '^/tmp/9p.sock /mnt/share 9p .*trans=unix' /proc/mounts
    cd /mnt/share
    said=$(tree)
    test "$said" = 2
    cd /dev/shm/shared
    umount /mnt/share
    find . -type f ! -name sums | xargs md5sum | sort -k 2 | cmp - sums
    test "$(stat -c '%s %a' guest/moved)" = '5 6711'
    test "$(stat -c %s guest/large)" = 12345
    rm -r guest sums
done
kill $server
wait $server
test ! -e /tmp/9p.sock
"#;

#[test]
fn unix_sockets_carry_mounts() {
    guest(&format!("tree() (\n{TREE}\n)\n{BY_UNIX}"), 0).ok();
}

/// Two namespaces, and between them 20 ms and one packet of twenty lost, each way. Four programs write, move, read back and
/// compare, on both sides, for some time: two by Linux's client, two by ours.
const LOSSY: &str = r#"
load drivers/net/veth net/sched/sch_netem
mkdir -p /run/netns
ip netns add s
ip netns add c
ip link add v0 netns s type veth peer name v1 netns c
ip -n s addr add 10.9.0.1/24 dev v0
ip -n c addr add 10.9.0.2/24 dev v1
ip -n s link set v0 up
ip -n c link set v1 up
serve nsenter --net=/run/netns/s $ferry share /dev/shm/shared --9p tcp:10.9.0.1:5640 --9p-remote
options=trans=tcp,port=5640,version=9p2000.L,msize=65536,cache=none
nsenter --net=/run/netns/c mount -i -t 9p -o $options 10.9.0.1 /mnt/p
timeout 60 nsenter --net=/run/netns/c $ferry mount 9p:tcp:10.9.0.1:5640 /mnt/own --connections 2
nsenter --net=/run/netns/s tc qdisc add dev v0 root netem loss 5% delay 20ms limit 10000
nsenter --net=/run/netns/c tc qdisc add dev v1 root netem loss 5% delay 20ms limit 10000
end=$(($(date +%s) + seconds))
work() {
    count=0
    mkdir $2/$1
    # Once at least, however long that takes.
    while :; do
        count=$((count + 1))
        name=$1/f$((count % 5))
        head -c $((count * 7919 % 150000 + 1)) /dev/urandom >/tmp/wanted$1
        cp /tmp/wanted$1 $2/$1/new
        mv $2/$1/new $2/$name
        cmp /tmp/wanted$1 $2/$name
        cmp /tmp/wanted$1 /dev/shm/shared/$name
        [ $(date +%s) -lt $end ] || break
    done
    echo "rounds$2 $count"
}
workers=
for name in a b; do
    (work $name /mnt/p) & workers="$workers $!"
done
for name in c d; do
    (work $name /mnt/own) & workers="$workers $!"
done
for worker in $workers; do wait $worker; done
for mount in /mnt/p /mnt/own; do
    diff -r $mount /dev/shm/shared
    umount $mount
done
kill $server
wait $server
dropped() { nsenter --net=/run/netns/$1 tc -s qdisc show dev $2 | sed -n 's/.*(dropped \([0-9]*\),.*/dropped \1/p'; }
dropped s v0
dropped c v1
"#;

/// Runs that for some time; what it counted is added up.
fn lossy(seconds: u64) {
    let ran = guest(LOSSY, seconds);
    let out = ran.ok();
    let sum = |word: &str| -> u64 {
        out.lines().filter_map(|line| line.strip_prefix(word)?.trim().parse::<u64>().ok()).sum()
    };
    let (kernels, ours, dropped) = (sum("rounds/mnt/p "), sum("rounds/mnt/own "), sum("dropped"));
    println!("{kernels} rounds by Linux's client and {ours} by ours in {seconds} s, {dropped} packets lost");
    assert!(kernels >= 2 && ours >= 2 && dropped > 0, "{out}");
}

#[test]
fn a_link_that_loses_and_delays_loses_nothing() {
    lossy(8);
}

#[test]
#[ignore = "long: make test-all"]
fn a_link_that_loses_and_delays_loses_nothing_for_long() {
    // An hour's worth, or as much as there is time for.
    let seconds = std::env::var("FERRY_LINK_SECONDS").ok().map_or(300, |text| text.parse().unwrap());
    lossy(seconds);
}
