// SPDX-License-Identifier: GPL-2.0
/* The knobs infiniband/<hca>/ibloop/, and the counters infiniband/<hca>/ports/1/hw_counters/. */
#include "ibloop.h"

static struct ibloop_hca *dev_to_hca(struct device *dev)
{
	return to_hca(rdma_device_to_ibdev(dev));
}

static ssize_t port_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%s\n", READ_ONCE(dev_to_hca(dev)->plugged) ? "up" : "down");
}

static ssize_t port_store(struct device *dev, struct device_attribute *attr, const char *buf,
			  size_t count)
{
	unsigned long flags;
	bool plugged;

	if (sysfs_streq(buf, "up"))
		plugged = true;
	else if (sysfs_streq(buf, "down"))
		plugged = false;
	else
		return -EINVAL;
	spin_lock_irqsave(&fabric.lock, flags);
	dev_to_hca(dev)->plugged = plugged;
	ibloop_update_ports();
	spin_unlock_irqrestore(&fabric.lock, flags);
	return count;
}
static DEVICE_ATTR_RW(port);

static ssize_t sa_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%s\n", READ_ONCE(dev_to_hca(dev)->sa_on) ? "on" : "off");
}

static ssize_t sa_store(struct device *dev, struct device_attribute *attr, const char *buf,
			size_t count)
{
	struct ibloop_hca *hca = dev_to_hca(dev);
	unsigned long flags;
	bool on, changed;

	if (sysfs_streq(buf, "on"))
		on = true;
	else if (sysfs_streq(buf, "off"))
		on = false;
	else
		return -EINVAL;
	spin_lock_irqsave(&fabric.lock, flags);
	changed = hca->sa_on != on;
	hca->sa_on = on;
	spin_unlock_irqrestore(&fabric.lock, flags);
	if (changed && on)	/* as a returning subnet manager does */
		ibloop_event(hca, IB_EVENT_CLIENT_REREGISTER);
	return count;
}
static DEVICE_ATTR_RW(sa);

static struct attribute *ibloop_knob_attrs[] = {
	&dev_attr_port.attr,
	&dev_attr_sa.attr,
	NULL,
};

const struct attribute_group ibloop_knobs = {
	.name = "ibloop",
	.attrs = ibloop_knob_attrs,
};

static const struct rdma_stat_desc ibloop_stats[] = {
	[IBLOOP_TX_PACKETS] = { .name = "sent_pkts" },
	[IBLOOP_RX_PACKETS] = { .name = "rcvd_pkts" },
	[IBLOOP_TX_BYTES] = { .name = "sent_bytes" },
	[IBLOOP_RX_BYTES] = { .name = "rcvd_bytes" },
};

static struct rdma_hw_stats *ibloop_alloc_stats(struct ib_device *ibdev, u32 port)
{
	return rdma_alloc_hw_stats_struct(ibloop_stats, IBLOOP_COUNTERS, 0);
}

static int ibloop_get_stats(struct ib_device *ibdev, struct rdma_hw_stats *stats, u32 port,
			    int index)
{
	const struct ibloop_hca *hca = to_hca(ibdev);
	unsigned long flags;
	unsigned int i;

	if (!port)
		return -EINVAL;	/* the device has no counters, only its port */
	spin_lock_irqsave(&fabric.lock, flags);
	for (i = 0; i < IBLOOP_COUNTERS; i++)
		stats->value[i] = hca->counters[i];
	spin_unlock_irqrestore(&fabric.lock, flags);
	return IBLOOP_COUNTERS;
}

const struct ib_device_ops ibloop_stats_ops = {
	.alloc_hw_port_stats = ibloop_alloc_stats,
	.get_hw_stats = ibloop_get_stats,
};
