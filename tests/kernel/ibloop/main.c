// SPDX-License-Identifier: GPL-2.0
/* Module parameters, and the life of an HCA: allocate, register, unregister. */
#include <linux/platform_device.h>

#include "ibloop.h"

MODULE_AUTHOR("podfabric");
MODULE_DESCRIPTION("Software InfiniBand HCAs on an in-memory switch, for tests");
MODULE_LICENSE("GPL");

static unsigned int hcas = 2;
module_param(hcas, uint, 0444);
MODULE_PARM_DESC(hcas, "number of HCAs, 1 to 16 (default 2; at least one for each parent)");

u16 ibloop_pkeys[IBLOOP_PKEYS] = { 0xffff, 0x8001, 0x8002, 0x8003 };
static unsigned int npkeys = 4;
module_param_array_named(pkeys, ibloop_pkeys, ushort, &npkeys, 0444);
MODULE_PARM_DESC(pkeys, "P_Key table of every port (default 0xffff,0x8001,0x8002,0x8003)");

static char *parents[IBLOOP_MAX_HCAS];
static unsigned int nparents;
module_param_array(parents, charp, &nparents, 0444);
MODULE_PARM_DESC(parents, "PCI functions (DDDD:BB:DD.F) to register the first HCAs under");

static unsigned int mtu = 2048;
module_param(mtu, uint, 0444);
MODULE_PARM_DESC(mtu, "IB MTU of ports and groups: 256, 512, 1024, 2048 (default) or 4096");

bool ibloop_vf_guids = true;
module_param_named(vf_guids, ibloop_vf_guids, bool, 0644);
MODULE_PARM_DESC(vf_guids, "VFs have GUIDs before their PF sets any (default Y); N: all FF");

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

static void ibloop_drop_parent(struct device *parent, struct platform_device *platform)
{
	put_device(parent);
	platform_device_unregister(platform);	/* NULL is fine */
}

/* Sets everything that does not depend on other HCAs. The place on the switch is the rest. */
static void ibloop_set_defaults(struct ibloop_hca *hca)
{
	struct ib_device *ibdev = &hca->ibdev;

	hca->gid.global.subnet_prefix = cpu_to_be64(IBLOOP_SUBNET_PREFIX);
	hca->plugged = true;
	hca->sa_on = true;
	xa_init_flags(&hca->qps, XA_FLAGS_ALLOC);

	ibdev->node_type = RDMA_NODE_IB_CA;
	ibdev->phys_port_cnt = 1;
	ibdev->num_comp_vectors = num_possible_cpus();
	ibdev->local_dma_lkey = 0;
	ibdev->dev.parent = hca->parent;
	ib_set_device_ops(ibdev, &ibloop_base_ops);
	ib_set_device_ops(ibdev, &ibloop_port_ops);
	ib_set_device_ops(ibdev, &ibloop_cq_ops);
	ib_set_device_ops(ibdev, &ibloop_qp_ops);
	ib_set_device_ops(ibdev, &ibloop_stats_ops);
	if (!hca->platform && to_pci_dev(hca->parent)->is_physfn)
		ib_set_device_ops(ibdev, &ibloop_pf_ops);
}

/* Puts an HCA at the first free place of the switch, with the LID of that place. */
static int ibloop_plug_in(struct ibloop_hca *hca)
{
	struct ib_device *ibdev = &hca->ibdev;
	unsigned long flags;
	unsigned int i;
	u64 guid;

	spin_lock_irqsave(&fabric.lock, flags);
	for (i = 0; i < IBLOOP_MAX_HCAS && fabric.hcas[i]; i++)
		;
	if (i == IBLOOP_MAX_HCAS) {
		spin_unlock_irqrestore(&fabric.lock, flags);
		return -ENOSPC;
	}
	hca->index = i;
	hca->lid = IBLOOP_FIRST_LID + i;
	guid = IBLOOP_GUID_BASE | (ibloop_function_id(hca) ?: i + 1) << 8;
	hca->node_guid = cpu_to_be64(guid);
	hca->gid.global.interface_id = cpu_to_be64(guid | IBLOOP_PORT);
	if (ibloop_is_vf(hca))
		ibloop_become_vf(hca);
	ibloop_fill_pkeys(hca);
	hca->up = ibloop_port_is_up(hca);
	fabric.hcas[i] = hca;
	spin_unlock_irqrestore(&fabric.lock, flags);
	ibdev->node_guid = hca->node_guid;
	snprintf(ibdev->node_desc, sizeof(ibdev->node_desc), "ibloop%u", i);
	return 0;
}

static void ibloop_unplug(struct ibloop_hca *hca)
{
	unsigned long flags;

	spin_lock_irqsave(&fabric.lock, flags);
	ibloop_sa_forget_port(hca);
	fabric.hcas[hca->index] = NULL;
	spin_unlock_irqrestore(&fabric.lock, flags);
}

/*
 * Every HCA has a device above it, as real ones do, so that net/<ipoib>/device/infiniband/<hca>
 * resolves: a PCI function, or a platform device of its own. The call takes over both references,
 * even if it fails.
 */
struct ibloop_hca *ibloop_add_hca(struct device *parent, struct platform_device *platform)
{
	struct ibloop_hca *hca;
	char name[IB_DEVICE_NAME_MAX];
	int err = -ENOMEM;

	hca = ib_alloc_device(ibloop_hca, ibdev);
	if (!hca)
		goto drop;
	hca->parent = parent;
	hca->platform = platform;
	ibloop_set_defaults(hca);
	/* It joins the switch before its registration, during which its MAD agents start to send. */
	err = ibloop_plug_in(hca);
	if (err)
		goto dealloc;
	snprintf(name, sizeof(name), "ibloop%u", hca->index);
	/* No DMA device: sg addresses are kernel virtual addresses. */
	err = ib_register_device(&hca->ibdev, name, NULL);
	if (!err)
		return hca;
	ibloop_unplug(hca);
dealloc:
	xa_destroy(&hca->qps);
	ib_dealloc_device(&hca->ibdev);
drop:
	ibloop_drop_parent(parent, platform);
	return ERR_PTR(err);
}

void ibloop_remove_hca(struct ibloop_hca *hca)
{
	struct platform_device *platform = hca->platform;
	struct device *parent = hca->parent;

	ib_unregister_device(&hca->ibdev);
	ibloop_unplug(hca);
	xa_destroy(&hca->qps);
	ib_dealloc_device(&hca->ibdev);
	ibloop_drop_parent(parent, platform);
}

/* Adds one of the HCAs that exist from the start: under a named PCI function, or alone. */
static int ibloop_add_first(unsigned int number)
{
	struct platform_device *platform = NULL;
	struct device *parent;

	if (number < nparents) {
		parent = ibloop_get_pci_function(parents[number]);
		if (!parent) {
			pr_err("ibloop: no PCI function \"%s\" (parameter parents)\n",
			       parents[number]);
			return -ENODEV;
		}
	} else {
		platform = platform_device_register_simple("ibloop", number, NULL, 0);
		if (IS_ERR(platform))
			return PTR_ERR(platform);
		parent = get_device(&platform->dev);
	}
	return PTR_ERR_OR_ZERO(ibloop_add_hca(parent, platform));
}

static void ibloop_remove_all(void)
{
	unsigned int i;

	for (i = 0; i < IBLOOP_MAX_HCAS; i++)
		if (fabric.hcas[i])
			ibloop_remove_hca(fabric.hcas[i]);
	ibloop_switch_exit();
	ibloop_sa_exit();
}

static int __init ibloop_init(void)
{
	unsigned int i;
	int err;

	memset(&ibloop_pkeys[npkeys], 0, (IBLOOP_PKEYS - npkeys) * sizeof(ibloop_pkeys[0]));
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
	for (i = 0; i < hcas && !err; i++)
		err = ibloop_add_first(i);
	if (!err)
		err = ibloop_sriov_init();
	if (err)
		ibloop_remove_all();
	return err;
}

static void __exit ibloop_exit(void)
{
	ibloop_sriov_exit();
	ibloop_remove_all();
}

module_init(ibloop_init);
module_exit(ibloop_exit);
