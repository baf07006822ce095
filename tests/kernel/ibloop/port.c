// SPDX-License-Identifier: GPL-2.0
/* Attributes of the device and its port, and the verbs objects without behaviour. */
#include "ibloop.h"

int ibloop_find_pkey(const struct ibloop_hca *hca, u16 pkey)
{
	int i;

	for (i = 0; i < IBLOOP_PKEYS; i++)
		if (ibloop_pkeys_match(hca->pkeys[i], pkey))
			return i;
	return -1;
}

void ibloop_event(struct ibloop_hca *hca, enum ib_event_type type)
{
	struct ib_event event = {
		.device = &hca->ibdev,
		.element.port_num = IBLOOP_PORT,
		.event = type,
	};

	/* No event while it comes or goes: the core has no place for it then. */
	if (ib_device_try_get(&hca->ibdev)) {
		ib_dispatch_event(&event);
		ib_device_put(&hca->ibdev);
	}
}

bool ibloop_port_is_up(const struct ibloop_hca *hca)
{
	enum ibloop_policy policy = hca->pf ? hca->pf->vfs[hca->vf_index].policy : IBLOOP_UP;

	if (!hca->plugged || policy == IBLOOP_DOWN)
		return false;
	return policy == IBLOOP_UP || hca->pf->plugged;
}

/* Brings every port into the state that knobs and policies require now. */
void ibloop_update_ports(void)
{
	unsigned int i;

	lockdep_assert_held(&fabric.lock);
	for (i = 0; i < IBLOOP_MAX_HCAS; i++) {
		struct ibloop_hca *hca = fabric.hcas[i];

		if (!hca || hca->up == ibloop_port_is_up(hca))
			continue;
		hca->up = !hca->up;
		if (!hca->up)
			ibloop_sa_forget_port(hca);
		ibloop_event(hca, hca->up ? IB_EVENT_PORT_ACTIVE : IB_EVENT_PORT_ERR);
	}
}

static int ibloop_query_device(struct ib_device *ibdev, struct ib_device_attr *attr,
			       struct ib_udata *udata)
{
	/* The core has zeroed attr: fields that are not set here are announced as 0. */
	attr->fw_ver = 1;
	attr->sys_image_guid = to_hca(ibdev)->node_guid;
	attr->vendor_id = 0x001b10;
	attr->vendor_part_id = 1;
	attr->hw_ver = 1;
	attr->max_mr_size = ~0ULL;
	attr->page_size_cap = PAGE_SIZE;
	attr->max_qp = 65536;
	attr->max_qp_wr = IBLOOP_MAX_WR;
	attr->device_cap_flags = IB_DEVICE_CHANGE_PHY_PORT | IB_DEVICE_PORT_ACTIVE_EVENT |
				 IB_DEVICE_SYS_IMAGE_GUID;
	attr->kernel_cap_flags = IBK_LOCAL_DMA_LKEY | IBK_BLOCK_MULTICAST_LOOPBACK;
	if (ibloop_is_vf(to_hca(ibdev)))
		attr->kernel_cap_flags |= IBK_VIRTUAL_FUNCTION;
	attr->max_send_sge = IBLOOP_MAX_SGE;
	attr->max_recv_sge = IBLOOP_MAX_SGE;
	attr->max_sge_rd = 1;
	attr->max_cq = 65536;
	attr->max_cqe = IBLOOP_MAX_CQE;
	attr->max_mr = 65536;
	attr->max_pd = 65536;
	attr->max_ah = 65536;
	attr->atomic_cap = IB_ATOMIC_NONE;
	attr->max_mcast_grp = 8192;
	attr->max_mcast_qp_attach = 8192;
	attr->max_total_mcast_qp_attach = 65536;
	attr->max_pkeys = IBLOOP_PKEYS;
	attr->local_ca_ack_delay = 15;
	return 0;
}

static int ibloop_query_port(struct ib_device *ibdev, u32 port, struct ib_port_attr *attr)
{
	struct ibloop_hca *hca = to_hca(ibdev);
	unsigned long flags;

	spin_lock_irqsave(&fabric.lock, flags);
	attr->state = hca->up ? IB_PORT_ACTIVE : IB_PORT_DOWN;
	attr->phys_state = hca->up ? IB_PORT_PHYS_STATE_LINK_UP : IB_PORT_PHYS_STATE_POLLING;
	attr->port_cap_flags = hca->port_cap_flags;
	spin_unlock_irqrestore(&fabric.lock, flags);
	attr->subnet_prefix = IBLOOP_SUBNET_PREFIX;
	attr->max_mtu = ibloop_mtu;
	attr->active_mtu = ibloop_mtu;
	attr->phys_mtu = ib_mtu_enum_to_int(ibloop_mtu);
	attr->gid_tbl_len = 1;
	attr->max_msg_sz = ib_mtu_enum_to_int(ibloop_mtu);
	attr->pkey_tbl_len = IBLOOP_PKEYS;
	attr->lid = hca->lid;
	attr->sm_lid = IBLOOP_SM_LID;
	attr->max_vl_num = 1;
	attr->subnet_timeout = 18;
	attr->active_width = IB_WIDTH_4X;
	attr->active_speed = IB_SPEED_EDR;
	return 0;
}

/* The CM sets IB_PORT_CM_SUP through this, and gives up on the port if it cannot. */
static int ibloop_modify_port(struct ib_device *ibdev, u32 port, int mask,
			      struct ib_port_modify *modify)
{
	struct ibloop_hca *hca = to_hca(ibdev);
	unsigned long flags;

	spin_lock_irqsave(&fabric.lock, flags);
	hca->port_cap_flags |= modify->set_port_cap_mask;
	hca->port_cap_flags &= ~modify->clr_port_cap_mask;
	spin_unlock_irqrestore(&fabric.lock, flags);
	return 0;
}

static int ibloop_get_port_immutable(struct ib_device *ibdev, u32 port,
				     struct ib_port_immutable *immutable)
{
	immutable->core_cap_flags = RDMA_CORE_PORT_IBA_IB;
	immutable->max_mad_size = IB_MGMT_MAD_SIZE;
	immutable->gid_tbl_len = 1;
	immutable->pkey_tbl_len = IBLOOP_PKEYS;
	return 0;
}

static enum rdma_link_layer ibloop_get_link_layer(struct ib_device *ibdev, u32 port)
{
	return IB_LINK_LAYER_INFINIBAND;
}

static int ibloop_query_gid(struct ib_device *ibdev, u32 port, int index, union ib_gid *gid)
{
	if (index)
		return -EINVAL;
	*gid = to_hca(ibdev)->gid;
	return 0;
}

static int ibloop_query_pkey(struct ib_device *ibdev, u32 port, u16 index, u16 *pkey)
{
	if (index >= IBLOOP_PKEYS)
		return -EINVAL;
	*pkey = READ_ONCE(to_hca(ibdev)->pkeys[index]);
	return 0;
}

/*
 * Enough of user verbs for a uverbs device to exist and be opened. Anything with a data path
 * (create_cq, create_qp, reg_user_mr) refuses user objects.
 */
static int ibloop_alloc_ucontext(struct ib_ucontext *context, struct ib_udata *udata)
{
	return 0;
}

static void ibloop_dealloc_ucontext(struct ib_ucontext *context)
{
}

static int ibloop_mmap(struct ib_ucontext *context, struct vm_area_struct *vma)
{
	return -EINVAL;
}

/* Must exist for moves to another namespace, and for an unload with open files. */
static void ibloop_disassociate_ucontext(struct ib_ucontext *context)
{
}

static int ibloop_alloc_pd(struct ib_pd *pd, struct ib_udata *udata)
{
	return 0;
}

static int ibloop_dealloc_pd(struct ib_pd *pd, struct ib_udata *udata)
{
	return 0;
}

static int ibloop_create_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init_attr,
			    struct ib_udata *udata)
{
	struct ibloop_ah *ah = to_ah(ibah);

	ah->attr = *init_attr->ah_attr;
	ah->attr.grh.sgid_attr = NULL;
	return 0;
}

/* The MAD layer matches replies to requests with this. */
static int ibloop_query_ah(struct ib_ah *ibah, struct rdma_ah_attr *attr)
{
	*attr = to_ah(ibah)->attr;
	return 0;
}

static int ibloop_destroy_ah(struct ib_ah *ibah, u32 flags)
{
	return 0;
}

/* MR verbs: without them the core treats the device as unusable for kernel ULPs. */
static struct ib_mr *ibloop_get_dma_mr(struct ib_pd *pd, int access)
{
	struct ib_mr *mr = kzalloc(sizeof(*mr), GFP_KERNEL);

	return mr ?: ERR_PTR(-ENOMEM);
}

static struct ib_mr *ibloop_reg_user_mr(struct ib_pd *pd, u64 start, u64 length, u64 virt_addr,
					int access,
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 17, 0)
					struct ib_dmah *dmah,
#endif
					struct ib_udata *udata)
{
	return ERR_PTR(-EOPNOTSUPP);
}

static int ibloop_dereg_mr(struct ib_mr *mr, struct ib_udata *udata)
{
	kfree(mr);
	return 0;
}

const struct ib_device_ops ibloop_port_ops = {
	.query_device = ibloop_query_device,
	.query_port = ibloop_query_port,
	.modify_port = ibloop_modify_port,
	.get_port_immutable = ibloop_get_port_immutable,
	.get_link_layer = ibloop_get_link_layer,
	.query_gid = ibloop_query_gid,
	.query_pkey = ibloop_query_pkey,
	.alloc_ucontext = ibloop_alloc_ucontext,
	.dealloc_ucontext = ibloop_dealloc_ucontext,
	.disassociate_ucontext = ibloop_disassociate_ucontext,
	.mmap = ibloop_mmap,
	.alloc_pd = ibloop_alloc_pd,
	.dealloc_pd = ibloop_dealloc_pd,
	.create_ah = ibloop_create_ah,
	.query_ah = ibloop_query_ah,
	.destroy_ah = ibloop_destroy_ah,
	.get_dma_mr = ibloop_get_dma_mr,
	.reg_user_mr = ibloop_reg_user_mr,
	.dereg_mr = ibloop_dereg_mr,
	INIT_RDMA_OBJ_SIZE(ib_ah, ibloop_ah, ibah),
	INIT_RDMA_OBJ_SIZE(ib_pd, ibloop_pd, ibpd),
	INIT_RDMA_OBJ_SIZE(ib_ucontext, ibloop_ucontext, ibucontext),
};
