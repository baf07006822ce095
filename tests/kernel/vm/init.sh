#!/bin/busybox sh
# The first init, in the initramfs: mounts a tmpfs overlay over this host's root file system and
# continues there with guest.sh. Kernel command line: podfabric.checkout=DIR (no blanks in it).
set -e
export PATH=/bin
/bin/busybox --install -s /bin

# Any failure here ends the machine immediately, not after the host's timeout.
trap 'echo "init: failed"; poweroff -f' EXIT

mount -t devtmpfs none /dev
mount -t proc none /proc
mount -t sysfs none /sys
while read -r module; do
    insmod "/modules/$module"
done < /modules/order

for word in $(cat /proc/cmdline); do
    case $word in
    podfabric.checkout=*) checkout=${word#*=} ;;
    podfabric.msize=*) msize=${word#*=} ;;
    esac
done

mount -t 9p -o "ro,trans=virtio,version=9p2000.L,msize=$msize,cache=loose" host /host
mount -t tmpfs -o mode=755 none /overlay
mkdir /overlay/upper /overlay/work
mount -t overlay -o lowerdir=/host,upperdir=/overlay/upper,workdir=/overlay/work none /root

# Fresh /tmp and /run; a checkout below one of them is mounted again at its path.
mkdir /checkout
mount --bind "/root$checkout" /checkout
mount -t tmpfs -o mode=1777 none /root/tmp
mount -t tmpfs -o mode=755 none /root/run
case $checkout in
/tmp/* | /run/*)
    mkdir -p "/root$checkout"
    mount --bind /checkout "/root$checkout"
    ;;
esac
umount /checkout

mount --move /proc /root/proc
mount --move /sys /root/sys
mount --move /dev /root/dev
trap - EXIT
exec switch_root /root "$checkout/tests/kernel/vm/guest.sh"
