// SPDX-License-Identifier: GPL-2.0
/* The in-memory switch: a queue of packets, and the worker that delivers them. */
#include "ibloop.h"

#define IBLOOP_BATCH 64		/* packets between two rounds of completion handlers */

struct ibloop_fabric fabric;

struct ibloop_hca *ibloop_hca_by_lid(u16 lid)
{
	unsigned int index = lid - IBLOOP_FIRST_LID;

	lockdep_assert_held(&fabric.lock);
	return index < IBLOOP_MAX_HCAS ? fabric.hcas[index] : NULL;
}

struct ibloop_hca *ibloop_hca_by_guid(__be64 guid)
{
	unsigned int i;

	lockdep_assert_held(&fabric.lock);
	for (i = 0; i < IBLOOP_MAX_HCAS; i++)
		if (fabric.hcas[i] && fabric.hcas[i]->gid.global.interface_id == guid)
			return fabric.hcas[i];
	return NULL;
}

/* Copies @length bytes, or zeros if @from is NULL, to @offset of a receive's buffers. */
static void ibloop_scatter(const struct ib_sge *sge, u32 offset, const void *from, u32 length)
{
	for (; length; sge++) {
		u32 chunk;

		if (offset >= sge->length) {
			offset -= sge->length;
			continue;
		}
		chunk = min(length, sge->length - offset);
		if (from) {
			memcpy((void *)(uintptr_t)(sge->addr + offset), from, chunk);
			from += chunk;
		} else {
			memset((void *)(uintptr_t)(sge->addr + offset), 0, chunk);
		}
		length -= chunk;
		offset = 0;
	}
}

/* The index of the receiver's P_Key that lets @packet in, or -1. */
static int ibloop_check_pkey(const struct ibloop_hca *hca, const struct ibloop_qp *qp,
			     const struct ibloop_packet *packet)
{
	switch (qp->ibqp.qp_type) {
	case IB_QPT_SMI:
		return 0;
	case IB_QPT_GSI:
		return ibloop_find_pkey(hca, packet->pkey);
	default:
		if (!ibloop_pkeys_match(hca->pkeys[qp->pkey_index], packet->pkey))
			return -1;
		return qp->pkey_index;
	}
}

static void ibloop_receive(struct ibloop_hca *hca, struct ibloop_qp *qp,
			   const struct ibloop_packet *packet)
{
	const struct ibloop_rwqe *rwqe;
	const struct ib_sge *sges;
	struct ib_wc wc = {};
	u32 room = 0;
	int pkey_index;
	unsigned int i;

	pkey_index = ibloop_check_pkey(hca, qp, packet);
	if (pkey_index < 0)
		return;
	if (qp->ibqp.qp_type != IB_QPT_SMI && packet->qkey != qp->qkey)
		return;
	if (!qp->rq_used)
		return;
	rwqe = &qp->rq[qp->rq_head];
	sges = &qp->rq_sges[qp->rq_head * qp->cap.max_recv_sge];
	for (i = 0; i < rwqe->num_sge; i++)
		room += sges[i].length;
	if (room < IBLOOP_GRH_ROOM + packet->length)
		return;
	ibloop_scatter(sges, 0, packet->has_grh ? &packet->grh : NULL, IBLOOP_GRH_ROOM);
	ibloop_scatter(sges, IBLOOP_GRH_ROOM, packet->payload, packet->length);

	wc.wr_id = rwqe->wr_id;
	wc.status = IB_WC_SUCCESS;
	wc.opcode = IB_WC_RECV;
	wc.byte_len = IBLOOP_GRH_ROOM + packet->length;
	wc.qp = &qp->ibqp;
	wc.src_qp = packet->src_qpn;
	wc.slid = packet->slid;
	wc.sl = packet->sl;
	wc.pkey_index = pkey_index;
	wc.port_num = IBLOOP_PORT;
	if (packet->has_grh)
		wc.wc_flags |= IB_WC_GRH;
	if (packet->has_imm) {
		wc.wc_flags |= IB_WC_WITH_IMM;
		wc.ex.imm_data = packet->imm;
	}
	qp->rq_head = (qp->rq_head + 1) % qp->cap.max_recv_wr;
	qp->rq_used--;
	hca->counters[IBLOOP_RX_PACKETS]++;
	hca->counters[IBLOOP_RX_BYTES] += packet->length;
	ibloop_cq_push(to_cq(qp->ibqp.recv_cq), &wc, packet->solicited);
}

static void ibloop_deliver_multicast(const struct ibloop_packet *packet)
{
	struct ibloop_attachment *attachment;

	if (!packet->has_grh)
		return;
	list_for_each_entry(attachment, &fabric.attachments, of_fabric) {
		struct ibloop_qp *qp = attachment->qp;
		struct ibloop_hca *hca = to_hca(qp->ibqp.device);

		if (attachment->mlid != packet->dlid ||
		    memcmp(&attachment->mgid, &packet->grh.dgid, sizeof(attachment->mgid)))
			continue;
		if (qp == packet->sender && qp->block_loopback)
			continue;
		if (hca->up && ibloop_qp_receives(qp))
			ibloop_receive(hca, qp, packet);
	}
}

static void ibloop_deliver_unicast(const struct ibloop_packet *packet)
{
	struct ibloop_hca *hca = ibloop_hca_by_lid(packet->dlid);
	struct ibloop_qp *qp;

	if (!hca || !hca->up)
		return;
	qp = xa_load(&hca->qps, packet->dest_qpn);
	if (qp && ibloop_qp_receives(qp))
		ibloop_receive(hca, qp, packet);
}

static void ibloop_deliver(const struct ibloop_packet *packet)
{
	struct ibloop_hca *from;

	lockdep_assert_held(&fabric.lock);
	if (!packet->sender) {
		ibloop_deliver_unicast(packet);		/* the SA's answer; its port may be gone */
		return;
	}
	from = to_hca(packet->sender->ibqp.device);
	if (!from->up || !packet->pkey)		/* an empty entry of the P_Key table */
		return;
	from->counters[IBLOOP_TX_PACKETS]++;
	from->counters[IBLOOP_TX_BYTES] += packet->length;
	if (packet->dlid == IBLOOP_SM_LID && packet->dest_qpn == 1)
		ibloop_sa_receive(from, packet);
	else if (packet->dlid >= be16_to_cpu(IB_MULTICAST_LID_BASE) &&
		 packet->dlid != be16_to_cpu(IB_LID_PERMISSIVE))
		ibloop_deliver_multicast(packet);
	else
		ibloop_deliver_unicast(packet);
}

static void ibloop_worker(struct work_struct *work)
{
	struct ibloop_packet *packet;
	unsigned long flags;
	unsigned int i;

	for (i = 0; i < IBLOOP_BATCH; i++) {
		spin_lock_irqsave(&fabric.lock, flags);
		packet = list_first_entry_or_null(&fabric.packets, struct ibloop_packet, queue);
		if (packet) {
			list_del(&packet->queue);
			ibloop_deliver(packet);
			if (packet->sender)
				ibloop_complete_send(packet->sender, packet->wr_id,
						     packet->signaled, IB_WC_SUCCESS);
		}
		spin_unlock_irqrestore(&fabric.lock, flags);
		if (!packet)
			break;
		kfree(packet);
	}
	ibloop_cq_run_handlers();
	if (i == IBLOOP_BATCH)
		ibloop_switch_kick();
}

void ibloop_switch_kick(void)
{
	queue_work(fabric.wq, &fabric.work);
}

void ibloop_switch_send(struct ibloop_packet *packet)
{
	lockdep_assert_held(&fabric.lock);
	list_add_tail(&packet->queue, &fabric.packets);
	ibloop_switch_kick();
}

/* Takes a QP's packets off the queue, with a flush completion each if @complete. */
void ibloop_switch_purge(struct ibloop_qp *qp, bool complete)
{
	struct ibloop_packet *packet, *next;

	lockdep_assert_held(&fabric.lock);
	list_for_each_entry_safe(packet, next, &fabric.packets, queue) {
		if (packet->sender != qp)
			continue;
		list_del(&packet->queue);
		if (complete)
			ibloop_complete_send(qp, packet->wr_id, true, IB_WC_WR_FLUSH_ERR);
		kfree(packet);
	}
}

int ibloop_switch_init(void)
{
	spin_lock_init(&fabric.lock);
	INIT_LIST_HEAD(&fabric.packets);
	INIT_LIST_HEAD(&fabric.ready);
	INIT_LIST_HEAD(&fabric.attachments);
	INIT_WORK(&fabric.work, ibloop_worker);
	/* Memory reclaim may wait for IPoIB, and so for its completions. */
	fabric.wq = alloc_ordered_workqueue("ibloop", WQ_MEM_RECLAIM);
	return fabric.wq ? 0 : -ENOMEM;
}

/* All HCAs are gone: only the SA's answers to them may be left. */
void ibloop_switch_exit(void)
{
	struct ibloop_packet *packet, *next;

	destroy_workqueue(fabric.wq);	/* drains, so the queue is normally empty */
	list_for_each_entry_safe(packet, next, &fabric.packets, queue)
		kfree(packet);
}
