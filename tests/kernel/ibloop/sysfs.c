// SPDX-License-Identifier: GPL-2.0
/* The knobs (infiniband/<hca>/ibloop/) and the counters (ports/1/hw_counters/). */
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
	if (changed && on)	/* as a subnet manager that comes back does */
		ibloop_event(hca, IB_EVENT_CLIENT_REREGISTER);
	return count;
}
static DEVICE_ATTR_RW(sa);

static ssize_t pkey_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct ibloop_hca *hca = dev_to_hca(dev);
	int i, length = 0;

	for (i = 0; i < IBLOOP_PKEYS; i++)
		length += sysfs_emit_at(buf, length, "%d 0x%04x\n", i, READ_ONCE(hca->pkeys[i]));
	return length;
}

/* "INDEX PKEY"; a P_Key of 0 empties the entry. */
static ssize_t pkey_store(struct device *dev, struct device_attribute *attr, const char *buf,
			  size_t count)
{
	struct ibloop_hca *hca = dev_to_hca(dev);
	unsigned int index, pkey;
	unsigned long flags;
	bool changed;

	if (sscanf(buf, "%u %i", &index, (int *)&pkey) != 2)
		return -EINVAL;
	if (index >= IBLOOP_PKEYS || pkey > U16_MAX || pkey == IBLOOP_FULL_MEMBER)
		return -EINVAL;
	spin_lock_irqsave(&fabric.lock, flags);
	changed = hca->pkeys[index] != pkey;
	hca->pkeys[index] = pkey;
	spin_unlock_irqrestore(&fabric.lock, flags);
	if (changed)
		ibloop_event(hca, IB_EVENT_PKEY_CHANGE);
	return count;
}
static DEVICE_ATTR_RW(pkey);

static struct attribute *ibloop_knob_attrs[] = {
	&dev_attr_port.attr,
	&dev_attr_sa.attr,
	&dev_attr_pkey.attr,
	NULL,
};

const struct attribute_group ibloop_knobs = {
	.name = "ibloop",
	.attrs = ibloop_knob_attrs,
};

static const struct rdma_stat_desc ibloop_counter_descs[IBLOOP_COUNTERS] = {
	[IBLOOP_TX_PACKETS].name = "tx_packets",
	[IBLOOP_RX_PACKETS].name = "rx_packets",
	[IBLOOP_TX_BYTES].name = "tx_bytes",
	[IBLOOP_RX_BYTES].name = "rx_bytes",
	[IBLOOP_TX_DROP_PORT_DOWN].name = "tx_drop_port_down",
	[IBLOOP_TX_DROP_PKEY].name = "tx_drop_pkey",
	[IBLOOP_TX_DROP_NO_DEST].name = "tx_drop_no_dest",
	[IBLOOP_TX_DROP_SA_OFF].name = "tx_drop_sa_off",
	[IBLOOP_RX_DROP_PORT_DOWN].name = "rx_drop_port_down",
	[IBLOOP_RX_DROP_NO_QP].name = "rx_drop_no_qp",
	[IBLOOP_RX_DROP_PKEY].name = "rx_drop_pkey",
	[IBLOOP_RX_DROP_QKEY].name = "rx_drop_qkey",
	[IBLOOP_RX_DROP_NO_BUFFER].name = "rx_drop_no_buffer",
	[IBLOOP_RX_DROP_TOO_LONG].name = "rx_drop_too_long",
	[IBLOOP_SA_REQUESTS].name = "sa_requests",
	[IBLOOP_SA_REFUSED].name = "sa_refused",
	[IBLOOP_CQ_OVERRUN].name = "cq_overrun",
};

static struct rdma_hw_stats *ibloop_alloc_hw_port_stats(struct ib_device *ibdev, u32 port)
{
	/* Lifespan 0: every read is fresh. */
	return rdma_alloc_hw_stats_struct(ibloop_counter_descs, IBLOOP_COUNTERS, 0);
}

static int ibloop_get_hw_stats(struct ib_device *ibdev, struct rdma_hw_stats *stats, u32 port,
			       int index)
{
	unsigned long flags;

	if (!port)
		return -EINVAL;
	spin_lock_irqsave(&fabric.lock, flags);
	memcpy(stats->value, to_hca(ibdev)->counters, sizeof(to_hca(ibdev)->counters));
	spin_unlock_irqrestore(&fabric.lock, flags);
	return IBLOOP_COUNTERS;
}

const struct ib_device_ops ibloop_counter_ops = {
	.alloc_hw_port_stats = ibloop_alloc_hw_port_stats,
	.get_hw_stats = ibloop_get_hw_stats,
};
