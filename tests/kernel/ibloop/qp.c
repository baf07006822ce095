// SPDX-License-Identifier: GPL-2.0
/* Queue pairs: UD, and the two special ones of the MAD layer. Multicast attachments. */
#include <linux/mm.h>

#include "ibloop.h"

#define IBLOOP_FIRST_QPN	0x100
#define IBLOOP_LAST_QPN		0xffffff

bool ibloop_qp_receives(const struct ibloop_qp *qp)
{
	return qp->state == IB_QPS_RTR || qp->state == IB_QPS_RTS || qp->state == IB_QPS_SQD ||
	       qp->state == IB_QPS_SQE;
}

/* Every send posted ends here exactly once, unless its QP is reset or destroyed first. */
void ibloop_complete_send(struct ibloop_qp *qp, u64 wr_id, bool signaled,
			  enum ib_wc_status status)
{
	struct ib_wc wc = {
		.wr_id = wr_id,
		.status = status,
		.opcode = IB_WC_SEND,
		.qp = &qp->ibqp,
		.port_num = IBLOOP_PORT,
	};

	lockdep_assert_held(&fabric.lock);
	qp->sends--;
	if (signaled || status != IB_WC_SUCCESS)
		ibloop_cq_push(to_cq(qp->ibqp.send_cq), &wc, false);
}

static void ibloop_flush_recv(struct ibloop_qp *qp, u64 wr_id)
{
	struct ib_wc wc = {
		.wr_id = wr_id,
		.status = IB_WC_WR_FLUSH_ERR,
		.opcode = IB_WC_RECV,
		.qp = &qp->ibqp,
		.port_num = IBLOOP_PORT,
	};

	ibloop_cq_push(to_cq(qp->ibqp.recv_cq), &wc, false);
}

void ibloop_flush_recvs(struct ibloop_qp *qp)
{
	lockdep_assert_held(&fabric.lock);
	while (qp->rq_used) {
		ibloop_flush_recv(qp, qp->rq[qp->rq_head].wr_id);
		qp->rq_head = (qp->rq_head + 1) % qp->cap.max_recv_wr;
		qp->rq_used--;
	}
}

/* Forgets all work requests that were posted or completed. */
static void ibloop_qp_reset(struct ibloop_qp *qp)
{
	lockdep_assert_held(&fabric.lock);
	ibloop_switch_purge(qp, false);
	qp->sends = 0;
	qp->rq_used = 0;
	ibloop_cq_forget_qp(to_cq(qp->ibqp.send_cq), &qp->ibqp);
	ibloop_cq_forget_qp(to_cq(qp->ibqp.recv_cq), &qp->ibqp);
}

static int ibloop_qp_number(struct ibloop_hca *hca, struct ibloop_qp *qp, enum ib_qp_type type)
{
	u32 qpn;
	int err;

	switch (type) {
	case IB_QPT_SMI:
	case IB_QPT_GSI:
		qpn = type == IB_QPT_SMI ? 0 : 1;
		err = xa_insert(&hca->qps, qpn, qp, GFP_KERNEL);
		break;
	default:
		/* Cyclic, as adapters do: a QP number shows in IPoIB's hardware address. */
		err = xa_alloc_cyclic(&hca->qps, &qpn, qp,
				      XA_LIMIT(IBLOOP_FIRST_QPN, IBLOOP_LAST_QPN), &hca->next_qpn,
				      GFP_KERNEL);
		break;
	}
	if (err < 0)
		return err;
	qp->ibqp.qp_num = qpn;
	return 0;
}

static int ibloop_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *init,
			    struct ib_udata *udata)
{
	struct ibloop_qp *qp = to_qp(ibqp);
	const struct ib_qp_cap *cap = &init->cap;
	int err;

	if (udata || init->srq || (init->create_flags & ~IB_QP_CREATE_BLOCK_MULTICAST_LOOPBACK))
		return -EOPNOTSUPP;
	if (init->qp_type != IB_QPT_UD && init->qp_type != IB_QPT_GSI &&
	    init->qp_type != IB_QPT_SMI)
		return -EOPNOTSUPP;
	if (cap->max_send_wr > IBLOOP_MAX_WR || cap->max_recv_wr > IBLOOP_MAX_WR ||
	    cap->max_send_sge > IBLOOP_MAX_SGE || cap->max_recv_sge > IBLOOP_MAX_SGE)
		return -EINVAL;

	qp->state = IB_QPS_RESET;
	qp->cap = *cap;
	qp->sig_type = init->sq_sig_type;
	qp->block_loopback = init->create_flags & IB_QP_CREATE_BLOCK_MULTICAST_LOOPBACK;
	INIT_LIST_HEAD(&qp->attachments);
	if (cap->max_recv_wr) {
		qp->rq = kvcalloc(cap->max_recv_wr, sizeof(*qp->rq), GFP_KERNEL);
		qp->rq_sges = kvcalloc(array_size(cap->max_recv_wr, max(cap->max_recv_sge, 1U)),
				       sizeof(*qp->rq_sges), GFP_KERNEL);
		if (!qp->rq || !qp->rq_sges) {
			err = -ENOMEM;
			goto free;
		}
	}
	err = ibloop_qp_number(to_hca(ibqp->device), qp, init->qp_type);
	if (err)
		goto free;
	return 0;
free:
	kvfree(qp->rq);
	kvfree(qp->rq_sges);
	return err;
}

static int ibloop_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata)
{
	struct ibloop_attachment *attachment, *next;
	struct ibloop_qp *qp = to_qp(ibqp);
	unsigned long flags;

	xa_erase(&to_hca(ibqp->device)->qps, ibqp->qp_num);
	/* The worker finds QPs only under the lock: after this block it can hold no reference to this
	 * one. */
	spin_lock_irqsave(&fabric.lock, flags);
	ibloop_qp_reset(qp);
	list_for_each_entry(attachment, &qp->attachments, of_qp)
		list_del(&attachment->of_fabric);
	spin_unlock_irqrestore(&fabric.lock, flags);
	list_for_each_entry_safe(attachment, next, &qp->attachments, of_qp)
		kfree(attachment);
	kvfree(qp->rq);
	kvfree(qp->rq_sges);
	return 0;
}

static int ibloop_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
			    struct ib_udata *udata)
{
	struct ibloop_qp *qp = to_qp(ibqp);
	enum ib_qp_state from, to;
	unsigned long flags;
	int err = -EINVAL;

	if (mask & ~IB_QP_ATTR_STANDARD_BITS)
		return -EOPNOTSUPP;
	spin_lock_irqsave(&fabric.lock, flags);
	from = mask & IB_QP_CUR_STATE ? attr->cur_qp_state : qp->state;
	to = mask & IB_QP_STATE ? attr->qp_state : from;
	if (from != qp->state || !ib_modify_qp_is_ok(from, to, ibqp->qp_type, mask))
		goto out;
	if ((mask & IB_QP_PKEY_INDEX) && attr->pkey_index >= IBLOOP_PKEYS)
		goto out;
	if ((mask & IB_QP_PORT) && attr->port_num != IBLOOP_PORT)
		goto out;
	if (mask & IB_QP_PKEY_INDEX)
		qp->pkey_index = attr->pkey_index;
	if (mask & IB_QP_QKEY)
		qp->qkey = attr->qkey;
	qp->state = to;
	if (to == IB_QPS_RESET) {
		ibloop_qp_reset(qp);
	} else if (to == IB_QPS_ERR) {
		/* Immediately, and for later posts too: otherwise IPoIB waits 5 s for each queue. */
		ibloop_switch_purge(qp, true);
		ibloop_flush_recvs(qp);
	}
	err = 0;
out:
	spin_unlock_irqrestore(&fabric.lock, flags);
	return err;
}

static int ibloop_query_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
			   struct ib_qp_init_attr *init)
{
	struct ibloop_qp *qp = to_qp(ibqp);
	unsigned long flags;

	memset(attr, 0, sizeof(*attr));
	memset(init, 0, sizeof(*init));
	spin_lock_irqsave(&fabric.lock, flags);
	attr->qp_state = qp->state;
	attr->cur_qp_state = qp->state;
	attr->qkey = qp->qkey;
	attr->pkey_index = qp->pkey_index;
	spin_unlock_irqrestore(&fabric.lock, flags);
	attr->port_num = IBLOOP_PORT;
	attr->path_mtu = ibloop_mtu;
	attr->cap = qp->cap;
	init->qp_type = ibqp->qp_type;
	init->send_cq = ibqp->send_cq;
	init->recv_cq = ibqp->recv_cq;
	init->qp_context = ibqp->qp_context;
	init->event_handler = ibqp->event_handler;
	init->sq_sig_type = qp->sig_type;
	init->cap = qp->cap;
	init->port_num = IBLOOP_PORT;
	return 0;
}

static void ibloop_fill_grh(struct ibloop_packet *packet, const struct ibloop_hca *hca,
			    const struct ib_global_route *route)
{
	struct ib_grh *grh = &packet->grh;

	packet->has_grh = true;
	grh->version_tclass_flow = cpu_to_be32(6U << 28 | (u32)route->traffic_class << 20 |
					       (route->flow_label & 0xfffff));
	grh->paylen = cpu_to_be16(packet->length + 12 + 8 + 4);	/* BTH, DETH, ICRC */
	grh->next_hdr = 0x1b;					/* IBA transport */
	grh->hop_limit = route->hop_limit;
	grh->sgid = hca->gid;
	grh->dgid = route->dgid;
}

static int ibloop_post_one_send(struct ibloop_qp *qp, const struct ib_send_wr *wr)
{
	const struct ib_ud_wr *ud = ud_wr(wr);
	struct ibloop_hca *hca = to_hca(qp->ibqp.device);
	const struct rdma_ah_attr *ah;
	struct ibloop_packet *packet;
	u16 pkey_index;
	u32 length = 0;
	int i;

	lockdep_assert_held(&fabric.lock);
	if (qp->sends >= qp->cap.max_send_wr)
		return -ENOMEM;
	if (qp->state == IB_QPS_ERR || qp->state == IB_QPS_SQE) {
		qp->sends++;
		ibloop_complete_send(qp, wr->wr_id, true, IB_WC_WR_FLUSH_ERR);
		return 0;
	}
	if (qp->state != IB_QPS_RTS || !ud->ah || wr->num_sge > qp->cap.max_send_sge ||
	    (wr->opcode != IB_WR_SEND && wr->opcode != IB_WR_SEND_WITH_IMM))
		return -EINVAL;
	for (i = 0; i < wr->num_sge; i++)
		length += wr->sg_list[i].length;
	if (length > ib_mtu_enum_to_int(ibloop_mtu))
		return -EINVAL;

	/* Copied now, so that no ULP buffer is touched after its completion or its QP's end. */
	packet = kmalloc(struct_size(packet, payload, length), GFP_ATOMIC);
	if (!packet)
		return -ENOMEM;
	memset(packet, 0, sizeof(*packet));
	for (i = 0; i < wr->num_sge; i++) {
		memcpy(packet->payload + packet->length,
		       (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
		packet->length += wr->sg_list[i].length;
	}
	ah = &to_ah(ud->ah)->attr;
	pkey_index = qp->ibqp.qp_type == IB_QPT_GSI ? ud->pkey_index : qp->pkey_index;
	packet->sender = qp;
	packet->wr_id = wr->wr_id;
	packet->signaled = qp->sig_type == IB_SIGNAL_ALL_WR ||
			   (wr->send_flags & IB_SEND_SIGNALED);
	packet->solicited = wr->send_flags & IB_SEND_SOLICITED;
	packet->has_imm = wr->opcode == IB_WR_SEND_WITH_IMM;
	packet->imm = packet->has_imm ? wr->ex.imm_data : 0;
	packet->slid = hca->lid;
	packet->dlid = rdma_ah_get_dlid(ah);
	packet->sl = rdma_ah_get_sl(ah);
	packet->src_qpn = qp->ibqp.qp_num;
	packet->dest_qpn = ud->remote_qpn;
	/* The high bit means "the Q_Key of the sending QP" (the MAD layer sends just that bit). */
	packet->qkey = ud->remote_qkey & IB_QP_SET_QKEY ? qp->qkey : ud->remote_qkey;
	if (qp->ibqp.qp_type == IB_QPT_SMI)
		packet->pkey = IB_DEFAULT_PKEY_FULL;
	else if (pkey_index < IBLOOP_PKEYS)
		packet->pkey = hca->pkeys[pkey_index];
	if (rdma_ah_get_ah_flags(ah) & IB_AH_GRH)
		ibloop_fill_grh(packet, hca, rdma_ah_read_grh(ah));
	qp->sends++;
	ibloop_switch_send(packet);
	return 0;
}

static int ibloop_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr,
			    const struct ib_send_wr **bad_wr)
{
	unsigned long flags;
	int err = 0;

	spin_lock_irqsave(&fabric.lock, flags);
	for (; wr; wr = wr->next) {
		err = ibloop_post_one_send(to_qp(ibqp), wr);
		if (err) {
			*bad_wr = wr;
			break;
		}
	}
	spin_unlock_irqrestore(&fabric.lock, flags);
	return err;
}

static int ibloop_post_one_recv(struct ibloop_qp *qp, const struct ib_recv_wr *wr)
{
	u32 slot;

	if (qp->state == IB_QPS_RESET || wr->num_sge > qp->cap.max_recv_sge)
		return -EINVAL;
	if (qp->state == IB_QPS_ERR) {
		ibloop_flush_recv(qp, wr->wr_id);
		return 0;
	}
	if (qp->rq_used == qp->cap.max_recv_wr)
		return -ENOMEM;
	slot = (qp->rq_head + qp->rq_used) % qp->cap.max_recv_wr;
	qp->rq[slot].wr_id = wr->wr_id;
	qp->rq[slot].num_sge = wr->num_sge;
	memcpy(&qp->rq_sges[slot * qp->cap.max_recv_sge], wr->sg_list,
	       wr->num_sge * sizeof(*wr->sg_list));
	qp->rq_used++;
	return 0;
}

static int ibloop_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr,
			    const struct ib_recv_wr **bad_wr)
{
	unsigned long flags;
	int err = 0;

	spin_lock_irqsave(&fabric.lock, flags);
	for (; wr; wr = wr->next) {
		err = ibloop_post_one_recv(to_qp(ibqp), wr);
		if (err) {
			*bad_wr = wr;
			break;
		}
	}
	spin_unlock_irqrestore(&fabric.lock, flags);
	return err;
}

static int ibloop_attach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	struct ibloop_qp *qp = to_qp(ibqp);
	struct ibloop_attachment *attachment;
	unsigned long flags;

	attachment = kzalloc(sizeof(*attachment), GFP_KERNEL);
	if (!attachment)
		return -ENOMEM;
	attachment->qp = qp;
	attachment->mgid = *gid;
	attachment->mlid = lid;
	spin_lock_irqsave(&fabric.lock, flags);
	list_add_tail(&attachment->of_qp, &qp->attachments);
	list_add_tail(&attachment->of_fabric, &fabric.attachments);
	spin_unlock_irqrestore(&fabric.lock, flags);
	return 0;
}

static int ibloop_detach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	struct ibloop_attachment *attachment, *found = NULL;
	unsigned long flags;

	spin_lock_irqsave(&fabric.lock, flags);
	list_for_each_entry(attachment, &to_qp(ibqp)->attachments, of_qp) {
		if (attachment->mlid == lid && !memcmp(&attachment->mgid, gid, sizeof(*gid))) {
			found = attachment;
			list_del(&found->of_qp);
			list_del(&found->of_fabric);
			break;
		}
	}
	spin_unlock_irqrestore(&fabric.lock, flags);
	kfree(found);
	return found ? 0 : -EINVAL;
}

const struct ib_device_ops ibloop_qp_ops = {
	.create_qp = ibloop_create_qp,
	.destroy_qp = ibloop_destroy_qp,
	.modify_qp = ibloop_modify_qp,
	.query_qp = ibloop_query_qp,
	.post_send = ibloop_post_send,
	.post_recv = ibloop_post_recv,
	.attach_mcast = ibloop_attach_mcast,
	.detach_mcast = ibloop_detach_mcast,
	INIT_RDMA_OBJ_SIZE(ib_qp, ibloop_qp, ibqp),
};
