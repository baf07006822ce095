// SPDX-License-Identifier: GPL-2.0
/*
 * The PCI driver "ibloop", and a PF's settings for its VFs, as in mlx5 (ib_virt.c, sriov.c).
 *
 * The driver's table of IDs is empty: a function is bound by its driver_override. Binding makes an
 * HCA under the function, unbinding removes it. A VF reads its GUIDs when it is bound; the policy
 * of its port has effect immediately.
 */
#include <linux/if_link.h>

#include "ibloop.h"

/* Includes a VF that another driver has and that the parameter `parents` names. */
bool ibloop_is_vf(const struct ibloop_hca *hca)
{
	return !hca->platform && to_pci_dev(hca->parent)->is_virtfn;
}

static struct pci_driver ibloop_pci_driver;

/* The part of the GUIDs of an HCA that comes from its function; 0 if our driver did not make the
 * HCA. */
u64 ibloop_function_id(const struct ibloop_hca *hca)
{
	if (hca->platform || to_pci_dev(hca->parent)->driver != &ibloop_pci_driver)
		return 0;
	return 0x10000 | pci_dev_id(to_pci_dev(hca->parent));
}

static struct ibloop_hca *ibloop_hca_of(struct pci_dev *function)
{
	if (function->driver != &ibloop_pci_driver)
		return NULL;
	return pci_get_drvdata(function);
}

/* Gives the PF's settings to a VF that is being bound, if this driver has the PF. */
void ibloop_become_vf(struct ibloop_hca *hca)
{
	struct pci_dev *function = to_pci_dev(hca->parent);
	struct ibloop_hca *pf = ibloop_hca_of(pci_physfn(function));
	const struct ibloop_vf *vf;
	int index = pci_iov_vf_id(function);

	lockdep_assert_held(&fabric.lock);
	if (function->driver != &ibloop_pci_driver || !pf || index < 0 || index >= IBLOOP_MAX_VFS)
		return;
	hca->pf = pf;
	hca->vf_index = index;
	vf = &pf->vfs[index];
	if (!ibloop_vf_guids) {
		hca->node_guid = cpu_to_be64(IBLOOP_NO_GUID);
		hca->gid.global.interface_id = cpu_to_be64(IBLOOP_NO_GUID);
	}
	if (vf->node_guid_set)
		hca->node_guid = cpu_to_be64(vf->node_guid);
	if (vf->port_guid_set)
		hca->gid.global.interface_id = cpu_to_be64(vf->port_guid);
}

/* Find the settings of a VF; NULL if the PF has no such VF. The caller holds fabric.lock. */
static struct ibloop_vf *ibloop_vf_of(struct ib_device *ibdev, int index)
{
	struct ibloop_hca *pf = to_hca(ibdev);

	if (index < 0 || index >= IBLOOP_MAX_VFS ||
	    index >= pci_num_vf(to_pci_dev(pf->parent)))
		return NULL;
	return &pf->vfs[index];
}

static int ibloop_get_vf_config(struct ib_device *ibdev, int index, u32 port,
				struct ifla_vf_info *info)
{
	static const u32 states[] = {
		[IBLOOP_FOLLOW] = IFLA_VF_LINK_STATE_AUTO,
		[IBLOOP_UP] = IFLA_VF_LINK_STATE_ENABLE,
		[IBLOOP_DOWN] = IFLA_VF_LINK_STATE_DISABLE,
	};
	struct ibloop_vf *vf;
	unsigned long flags;

	spin_lock_irqsave(&fabric.lock, flags);
	vf = ibloop_vf_of(ibdev, index);
	memset(info, 0, sizeof(*info));	/* mlx5 also reports spoofchk and trust as off this way */
	if (vf)
		info->linkstate = states[vf->policy];
	spin_unlock_irqrestore(&fabric.lock, flags);
	return vf ? 0 : -EINVAL;
}

static int ibloop_set_vf_link_state(struct ib_device *ibdev, int index, u32 port, int state)
{
	struct ibloop_vf *vf;
	enum ibloop_policy policy;
	unsigned long flags;

	switch (state) {
	case IFLA_VF_LINK_STATE_AUTO:
		policy = IBLOOP_FOLLOW;
		break;
	case IFLA_VF_LINK_STATE_ENABLE:
		policy = IBLOOP_UP;
		break;
	case IFLA_VF_LINK_STATE_DISABLE:
		policy = IBLOOP_DOWN;
		break;
	default:
		return -EINVAL;
	}
	spin_lock_irqsave(&fabric.lock, flags);
	vf = ibloop_vf_of(ibdev, index);
	if (vf) {
		vf->policy = policy;
		ibloop_update_ports();
	}
	spin_unlock_irqrestore(&fabric.lock, flags);
	return vf ? 0 : -EINVAL;
}

/* Zero for a GUID that was not set since the PF was bound, even if the VF has one. */
static int ibloop_get_vf_guid(struct ib_device *ibdev, int index, u32 port,
			      struct ifla_vf_guid *node_guid, struct ifla_vf_guid *port_guid)
{
	const struct ibloop_vf *vf;
	unsigned long flags;

	spin_lock_irqsave(&fabric.lock, flags);
	vf = ibloop_vf_of(ibdev, index);
	if (vf) {
		node_guid->guid = vf->node_guid_set ? vf->node_guid : 0;
		port_guid->guid = vf->port_guid_set ? vf->port_guid : 0;
	}
	spin_unlock_irqrestore(&fabric.lock, flags);
	return vf ? 0 : -EINVAL;
}

static int ibloop_set_vf_guid(struct ib_device *ibdev, int index, u32 port, u64 guid, int type)
{
	struct ibloop_vf *vf;
	unsigned long flags;

	spin_lock_irqsave(&fabric.lock, flags);
	vf = ibloop_vf_of(ibdev, index);
	if (vf && type == IFLA_VF_IB_NODE_GUID) {
		vf->node_guid = guid;
		vf->node_guid_set = true;
	} else if (vf) {	/* ib_ipoib passes no third type */
		vf->port_guid = guid;
		vf->port_guid_set = true;
	}
	spin_unlock_irqrestore(&fabric.lock, flags);
	return vf ? 0 : -EINVAL;
}

/* The VF's counters since its driver was bound. */
static int ibloop_get_vf_stats(struct ib_device *ibdev, int index, u32 port,
			       struct ifla_vf_stats *stats)
{
	const struct ibloop_hca *pf = to_hca(ibdev);
	unsigned long flags;
	unsigned int i;
	bool exists;

	memset(stats, 0, sizeof(*stats));
	spin_lock_irqsave(&fabric.lock, flags);
	exists = ibloop_vf_of(ibdev, index);
	for (i = 0; i < IBLOOP_MAX_HCAS && exists; i++) {
		const struct ibloop_hca *hca = fabric.hcas[i];

		if (!hca || hca->pf != pf || hca->vf_index != index)
			continue;
		stats->tx_packets = hca->counters[IBLOOP_TX_PACKETS];
		stats->rx_packets = hca->counters[IBLOOP_RX_PACKETS];
		stats->tx_bytes = hca->counters[IBLOOP_TX_BYTES];
		stats->rx_bytes = hca->counters[IBLOOP_RX_BYTES];
	}
	spin_unlock_irqrestore(&fabric.lock, flags);
	return exists ? 0 : -EINVAL;
}

const struct ib_device_ops ibloop_pf_ops = {
	.get_vf_config = ibloop_get_vf_config,
	.get_vf_guid = ibloop_get_vf_guid,
	.get_vf_stats = ibloop_get_vf_stats,
	.set_vf_guid = ibloop_set_vf_guid,
	.set_vf_link_state = ibloop_set_vf_link_state,
};

static int ibloop_probe(struct pci_dev *function, const struct pci_device_id *id)
{
	struct ibloop_hca *hca = ibloop_add_hca(get_device(&function->dev), NULL);

	if (IS_ERR(hca))
		return PTR_ERR(hca);
	pci_set_drvdata(function, hca);
	return 0;
}

static void ibloop_pci_remove(struct pci_dev *function)
{
	struct ibloop_hca *hca = pci_get_drvdata(function);

	if (function->is_physfn)
		pci_disable_sriov(function);	/* its VFs go first: they point to it */
	pci_set_drvdata(function, NULL);
	ibloop_remove_hca(hca);
}

static int ibloop_sriov_configure(struct pci_dev *function, int number)
{
	if (number > IBLOOP_MAX_VFS)
		return -EINVAL;
	return pci_sriov_configure_simple(function, number);
}

static const struct pci_device_id ibloop_no_ids[] = {
	{ }
};

static struct pci_driver ibloop_pci_driver = {
	.name = "ibloop",
	.id_table = ibloop_no_ids,
	.probe = ibloop_probe,
	.remove = ibloop_pci_remove,
	.sriov_configure = ibloop_sriov_configure,
};

int ibloop_sriov_init(void)
{
	return pci_register_driver(&ibloop_pci_driver);
}

void ibloop_sriov_exit(void)
{
	pci_unregister_driver(&ibloop_pci_driver);
}
