// SPDX-License-Identifier: GPL-2.0
/* The knobs infiniband/<hca>/ibloop/. */
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
