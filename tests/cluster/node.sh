#!/bin/sh
# In the virtual machine: prepares the node for containerd and kubelet, then starts the server that
# runs commands for the tests. Arguments: the server and its port.
set -e
/sbin/modprobe -a virtio_net virtio_blk ext4 bridge br_netfilter veth overlay

# QEMU's own network, through which the node reaches the API server.
for path in /sys/class/net/*; do
    case $(readlink "$path/device/driver") in
    */virtio_net) management=${path##*/} ;;
    esac
done
ip link set "$management" up
ip address add 10.0.2.15/24 dev "$management"
ip route add default via 10.0.2.2

# These directories survive a restart of the machine.
mkdir -p /mnt/disk
mount -t ext4 /dev/vda /mnt/disk
for directory in /etc/cni /etc/podfabric /opt/cni /var/lib/cni /var/lib/containerd \
    /var/lib/kubelet /var/lib/podfabric /var/log; do
    mkdir -p "$directory" "/mnt/disk$directory"
    mount --bind "/mnt/disk$directory" "$directory"
done
mkdir -p /opt/cni/bin /etc/cni/net.d /run/node
mount --make-rshared /
echo 1 > /proc/sys/net/ipv4/ip_forward
exec /usr/bin/python3 "$@"
