# The guest's first process. The crate puts assignments and the functions mount_shares, start_services
# and run_command before this text (see script.rs); $busybox is a static one. It talks with the host over $control:
#
#   to the host    ready | status N | error TEXT
#   from the host  data N, then N bytes of standard input | eof | size ROWS COLUMNS

b() { "$busybox" "$@"; }

fail() {
    echo "error $*" >&3
    b sleep 0.2
    b poweroff -f
}

# A root that is the host's (or the root share's) with a layer of memory above it: all is there, nothing
# written to it stays.
enter_root() {
    b mount -t proc proc /proc
    # The boot itself is quiet; from here on the log is to tell why a mount fails.
    echo 8 >/proc/sys/kernel/printk
    b mount -t tmpfs tmpfs /mnt
    for module in $modules; do b insmod "$module" || echo "init: cannot load $module"; done
    b mkdir /mnt/upper /mnt/work /mnt/root /mnt/lower
    if [ "$root" = initramfs ]; then
        new=/
    else
        new=/mnt/root
        lower=/
        if [ "$root" != / ]; then
            lower=/mnt/lower
            b mount -t virtiofs -o ro "$root" $lower || root_failed="cannot mount the root share '$root'"
        fi
        b mount -t overlay -o "lowerdir=$lower,upperdir=/mnt/upper,workdir=/mnt/work" root $new ||
            root_failed=${root_failed:-cannot mount the root overlay}
        # An overlay refuses the mount points within a share that announces them: then do without.
        if [ -z "${root_failed:-}" ] && ! b stat $new/proc >/dev/null 2>&1; then
            b umount $new
            new=$lower
            for dir in tmp mnt; do b mount -t tmpfs tmpfs $new/$dir; done
        fi
    fi
    if [ -n "${root_failed:-}" ]; then new=/; fi
    for dir in proc sys dev run tmp mnt; do [ -d "$new/$dir" ] || b mkdir "$new/$dir"; done
    [ $new/proc = //proc ] || b mount -t proc proc $new/proc
    b mount -t sysfs sys $new/sys
    b mount -t devtmpfs dev $new/dev
    b mkdir -p $new/dev/pts $new/dev/shm
    b mount -t devpts -o mode=620,ptmxmode=666 devpts $new/dev/pts
    b mount -t tmpfs tmpfs $new/dev/shm
    b mount -t tmpfs -o mode=755 tmpfs $new/run
    b mkdir $new/run/ferry
    b cp "$busybox" $new/run/ferry/busybox
    b cp "$0" $new/run/ferry/init
    export root_failed
    cd $new
    [ $new = / ] || b mount --move . /
    exec "$busybox" chroot . /run/ferry/busybox sh /run/ferry/init started
}

# QEMU's ports have names. The kernel learns of them one after the other, so this may have to wait.
find_ports() {
    [ "$kind" = qemu ] || return 0
    attempts=300
    while [ $attempts -gt 0 ]; do
        attempts=$((attempts - 1))
        for port in /sys/class/virtio-ports/*; do
            case $(b cat "$port/name" 2>/dev/null) in
            control) control=/dev/${port##*/} ;;
            stdout) stdout=/dev/${port##*/} ;;
            stderr) stderr=/dev/${port##*/} ;;
            esac
        done
        [ -z "$control" ] || [ -z "$stdout" ] || [ "$terminal$stderr" = 0 ] || return 0
        b sleep 0.2
    done
}

# As a line that is binary-clean.
raw() { [ "$kind" = qemu ] || b stty raw -echo; }

# Follows what the host says until it goes away; then there is nobody left to work for.
follow_host() {
    while read -r word one two <&3; do
        case $word in
        data) b dd bs="$one" count=1 iflag=fullblock <&3 2>/dev/null ;;
        eof) exec >/dev/null ;;
        size) b stty rows "$one" cols "$two" <"$stdout" ;;
        esac
    done
}

prepare() {
    find_ports
    exec 3<>"$control"
    raw <&3
    [ -z "$root_failed" ] || fail "$root_failed"
    b ln -sf /proc/self/fd /dev/fd
    b ln -sf /proc/self/fd/0 /dev/stdin
    b ln -sf /proc/self/fd/1 /dev/stdout
    b ln -sf /proc/self/fd/2 /dev/stderr
    b ip link set lo up
    b hostname ferry-guest
    if [ "$root" = initramfs ]; then b --install -s /bin; fi
    if [ -n "$module_directory" ] && [ -d "$module_directory" ]; then
        b mkdir -p /lib/modules
        b ln -sfn "$module_directory" "/lib/modules/$(b uname -r)"
        b ln -s busybox /run/ferry/modprobe
        [ -x /sbin/modprobe ] || echo /run/ferry/modprobe >/proc/sys/kernel/modprobe
    fi
    mount_shares
    start_services
    echo ready >&3
}

# On a terminal: the command is the leader of a session that $stdout controls.
run_on_terminal() {
    follow_host >/dev/null &
    "$busybox" setsid -c "$busybox" sh /run/ferry/init command <"$stdout" >"$stdout" 2>&1
    status=$?
}

# Otherwise through pipes, as on the host: a program must not take the host's pipe for a terminal.
run_on_pipes() {
    b mkfifo /run/ferry/in /run/ferry/out /run/ferry/err
    { raw <&1; b cat; } </run/ferry/out >"$stdout" &
    out=$!
    { raw <&1; b cat; } </run/ferry/err >"$stderr" &
    err=$!
    if [ "$stdin" = null ]; then
        input=/dev/null
        follow_host >/dev/null &
    else
        input=/run/ferry/in
        follow_host >/run/ferry/in &
    fi
    "$busybox" setsid "$busybox" sh /run/ferry/init command <$input >/run/ferry/out 2>/run/ferry/err 3<&- &
    wait $!
    status=$?
    wait $out $err
}

unmount_shares() {
    for mount in $(b awk '$3 == "virtiofs" || $3 == "9p" || $1 ~ "^/dev/vd" { print $2 }' /proc/mounts | b tac); do
        b umount "$(printf %b "$mount")" || left=1
    done 2>/dev/null
}

case ${1:-} in
'')
    enter_root
    ;;
command)
    # Here the terminal stays open, and keeps the size.
    [ "$terminal" = 0 ] || b stty rows "$rows" cols "$columns"
    run_command
    ;;
started)
    prepare
    if [ "$terminal" = 1 ]; then run_on_terminal; else run_on_pipes; fi
    cd /
    if [ -n "$services" ]; then
        b kill $services
        wait $services
    fi 2>/dev/null
    left=
    unmount_shares
    if [ -n "$left" ]; then
        b kill -9 -1
        b sleep 0.1
        unmount_shares
        b sync
    fi
    echo "status $status" >&3
    b sleep 0.05
    b poweroff -f
    ;;
esac
