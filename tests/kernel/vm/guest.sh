#!/bin/sh
# The second init, on the host's root file system: starts real drivers, runs the command, powers
# off. ip, modprobe and the like have absolute paths, because a busybox shell would run its own.
checkout=$(pwd)
for word in $(cat /proc/cmdline); do
    case $word in
    podfabric.checkout=*) checkout=${word#*=} ;;
    podfabric.msize=*) msize=${word#*=} ;;
    esac
done

share=/run/podfabric-vm # the host's temporary directory, with the command and its results
/bin/mkdir "$share"
/bin/mount -t 9p -o "trans=virtio,version=9p2000.L,msize=$msize,cache=none" share "$share"

finish() {
    /bin/dmesg > "$share/dmesg.log"
    echo "$1" > "$share/status.new"
    /bin/mv "$share/status.new" "$share/status"
    /bin/umount "$share"
    echo o > /proc/sysrq-trigger
    while :; do /bin/sleep 1; done
}

fail() {
    echo "guest: $*" > /dev/kmsg
    echo "guest: $*" > /dev/vport0p1
    finish 125
}

/bin/ln -s /proc/self/fd /dev/fd
/bin/ln -s /proc/self/fd/0 /dev/stdin
/bin/ln -s /proc/self/fd/1 /dev/stdout
/bin/ln -s /proc/self/fd/2 /dev/stderr
/bin/mkdir -p /dev/pts /dev/shm /lib/modules /run/lock
/bin/mount -t devpts -o mode=620,ptmxmode=666 none /dev/pts
/bin/mount -t tmpfs -o mode=1777 none /dev/shm
/bin/mount -t cgroup2 none /sys/fs/cgroup
/bin/mount --bind "$checkout/build/vm/kernel/lib/modules" /lib/modules
echo podfabric-vm > /proc/sys/kernel/hostname
/usr/sbin/ip link set lo up

/sbin/modprobe -a ib_umad ib_uverbs rdma_cm rdma_ucm ib_ipoib ibloop || fail "modprobe failed"
for parent in ib0 ib1; do
    /usr/sbin/ip link set "$parent" up || fail "no $parent"
done
for parent in ib0 ib1; do
    tries=100
    until [ "$(cat /sys/class/net/$parent/carrier)" = 1 ]; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || fail "$parent: no carrier"
        /bin/sleep 0.1
    done
done

echo "guest: command starts" > /dev/kmsg
/bin/sh "$share/command.sh" < /dev/null > /dev/vport0p1 2>&1
status=$?
echo "guest: command ended with $status" > /dev/kmsg
finish "$status"
