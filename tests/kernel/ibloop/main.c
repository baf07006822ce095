// SPDX-License-Identifier: GPL-2.0
/* Module parameters, and the life of an HCA: allocate, register, unregister. */
#include <linux/pci.h>
#include <linux/platform_device.h>

#include "ibloop.h"

MODULE_AUTHOR("podfabric");
MODULE_DESCRIPTION("Software InfiniBand HCAs on an in-memory switch, for tests");
MODULE_LICENSE("GPL");

static unsigned int hcas = 2;
module_param(hcas, uint, 0444);
MODULE_PARM_DESC(hcas, "number of HCAs, 1 to 16 (default 2; at least one for each parent)");

static ushort pkeys[IBLOOP_PKEYS] = { 0xffff, 0x8001, 0x8002, 0x8003 };
static unsigned int npkeys = 4;
module_param_array(pkeys, ushort, &npkeys, 0444);
MODULE_PARM_DESC(pkeys, "P_Key table of every port (default 0xffff,0x8001,0x8002,0x8003)");

static char *parents[IBLOOP_MAX_HCAS];
static unsigned int nparents;
module_param_array(parents, charp, &nparents, 0444);
MODULE_PARM_DESC(parents, "PCI functions (DDDD:BB:DD.F) to register the first HCAs under");

static unsigned int mtu = 2048;
module_param(mtu, uint, 0444);
MODULE_PARM_DESC(mtu, "IB MTU of ports and groups: 256, 512, 1024, 2048 (default) or 4096");

enum ib_mtu ibloop_mtu;

static const struct ib_device_ops ibloop_base_ops = {
	.owner = THIS_MODULE,
	.driver_id = RDMA_DRIVER_UNKNOWN,
	.uverbs_abi_ver = 1,
	.device_group = &ibloop_knobs,
};

static struct device *ibloop_get_pci_function(const char *bdf)
{
	unsigned int domain, bus, slot, function;
	struct pci_dev *pdev;

	if (sscanf(bdf, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
		return NULL;
	pdev = pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(slot, function));
	return pdev ? &pdev->dev : NULL;
}

/*
 * Every HCA has a device above it, as real ones do, so that net/<ipoib>/device/infiniband/<hca>
 * resolves: the named PCI function, or a platform device of its own.
 */
static int ibloop_take_parent(struct ibloop_hca *hca)
{
	struct platform_device *platform;

	if (hca->index < nparents) {
		hca->parent = ibloop_get_pci_function(parents[hca->index]);
		if (!hca->parent) {
			pr_err("ibloop: no PCI function \"%s\" (parameter parents)\n",
			       parents[hca->index]);
			return -ENODEV;
		}
		return 0;
	}
	platform = platform_device_register_simple("ibloop", hca->index, NULL, 0);
	if (IS_ERR(platform))
		return PTR_ERR(platform);
	hca->platform = platform;
	hca->parent = get_device(&platform->dev);
	return 0;
}

static void ibloop_drop_parent(struct device *parent, struct platform_device *platform)
{
	put_device(parent);
	platform_device_unregister(platform);	/* NULL is fine */
}

static void ibloop_set_identity(struct ibloop_hca *hca)
{
	struct ib_device *ibdev = &hca->ibdev;
	u64 guid = IBLOOP_GUID_BASE | ((u64)(hca->index + 1) << 8);

	hca->lid = IBLOOP_FIRST_LID + hca->index;
	hca->node_guid = cpu_to_be64(guid);
	hca->gid.global.subnet_prefix = cpu_to_be64(IBLOOP_SUBNET_PREFIX);
	hca->gid.global.interface_id = cpu_to_be64(guid | IBLOOP_PORT);
	hca->up = true;
	hca->sa_on = true;
	memcpy(hca->pkeys, pkeys, npkeys * sizeof(pkeys[0]));

	ibdev->node_type = RDMA_NODE_IB_CA;
	ibdev->node_guid = hca->node_guid;
	snprintf(ibdev->node_desc, sizeof(ibdev->node_desc), "ibloop%u", hca->index);
	ibdev->phys_port_cnt = 1;
	ibdev->num_comp_vectors = num_possible_cpus();
	ibdev->local_dma_lkey = 0;
	ibdev->dev.parent = hca->parent;
}

static int ibloop_add_hca(unsigned int index)
{
	struct platform_device *platform;
	struct ibloop_hca *hca;
	struct device *parent;
	unsigned long flags;
	char name[IB_DEVICE_NAME_MAX];
	int err;

	hca = ib_alloc_device(ibloop_hca, ibdev);
	if (!hca)
		return -ENOMEM;
	hca->index = index;
	xa_init_flags(&hca->qps, XA_FLAGS_ALLOC);
	err = ibloop_take_parent(hca);
	if (err)
		goto dealloc;
	parent = hca->parent;
	platform = hca->platform;
	ibloop_set_identity(hca);
	ib_set_device_ops(&hca->ibdev, &ibloop_base_ops);
	ib_set_device_ops(&hca->ibdev, &ibloop_port_ops);
	ib_set_device_ops(&hca->ibdev, &ibloop_cq_ops);
	ib_set_device_ops(&hca->ibdev, &ibloop_qp_ops);
	ib_set_device_ops(&hca->ibdev, &ibloop_counter_ops);

	/* On the switch before it is registered: its MAD agents start sending while it is. */
	spin_lock_irqsave(&fabric.lock, flags);
	fabric.hcas[index] = hca;
	spin_unlock_irqrestore(&fabric.lock, flags);
	snprintf(name, sizeof(name), "ibloop%u", index);
	/* No DMA device: sg addresses are kernel virtual addresses. */
	err = ib_register_device(&hca->ibdev, name, NULL);
	if (!err)
		return 0;

	spin_lock_irqsave(&fabric.lock, flags);
	fabric.hcas[index] = NULL;
	spin_unlock_irqrestore(&fabric.lock, flags);
	xa_destroy(&hca->qps);
	ib_dealloc_device(&hca->ibdev);
	ibloop_drop_parent(parent, platform);
	return err;
dealloc:
	ib_dealloc_device(&hca->ibdev);
	return err;
}

static void ibloop_remove_hca(unsigned int index)
{
	struct ibloop_hca *hca = fabric.hcas[index];
	struct platform_device *platform;
	struct device *parent;
	unsigned long flags;

	if (!hca)
		return;
	parent = hca->parent;
	platform = hca->platform;
	ib_unregister_device(&hca->ibdev);
	spin_lock_irqsave(&fabric.lock, flags);
	ibloop_sa_forget_port(hca);
	fabric.hcas[index] = NULL;
	spin_unlock_irqrestore(&fabric.lock, flags);
	xa_destroy(&hca->qps);
	ib_dealloc_device(&hca->ibdev);
	ibloop_drop_parent(parent, platform);
}

static void ibloop_remove_all(void)
{
	unsigned int i;

	for (i = 0; i < IBLOOP_MAX_HCAS; i++)
		ibloop_remove_hca(i);
	ibloop_switch_exit();
	ibloop_sa_exit();
}

static int __init ibloop_init(void)
{
	unsigned int i;
	int err;

	hcas = max(hcas, nparents);
	if (!hcas || hcas > IBLOOP_MAX_HCAS) {
		pr_err("ibloop: hcas=%u is not in 1..%u\n", hcas, IBLOOP_MAX_HCAS);
		return -EINVAL;
	}
	ibloop_mtu = ib_mtu_int_to_enum(mtu);
	if (ib_mtu_enum_to_int(ibloop_mtu) != mtu) {
		pr_err("ibloop: mtu=%u is not an IB MTU\n", mtu);
		return -EINVAL;
	}
	err = ibloop_switch_init();
	if (err)
		return err;
	for (i = 0; i < hcas; i++) {
		err = ibloop_add_hca(i);
		if (err) {
			ibloop_remove_all();
			return err;
		}
	}
	return 0;
}

static void __exit ibloop_exit(void)
{
	ibloop_remove_all();
}

module_init(ibloop_init);
module_exit(ibloop_exit);
