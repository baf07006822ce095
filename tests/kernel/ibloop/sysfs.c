// SPDX-License-Identifier: GPL-2.0
/* The knob infiniband/<hca>/ibloop/port. */
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

static struct attribute *ibloop_knob_attrs[] = {
	&dev_attr_port.attr,
	NULL,
};

const struct attribute_group ibloop_knobs = {
	.name = "ibloop",
	.attrs = ibloop_knob_attrs,
};
