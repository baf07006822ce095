// SPDX-License-Identifier: GPL-2.0
/* Completion queues: a ring each, and handlers called from the worker. */
#include <linux/bottom_half.h>
#include <linux/completion.h>
#include <linux/mm.h>

#include "ibloop.h"

/* Appends a completion; its handler, if armed, is called by the worker. */
void ibloop_cq_push(struct ibloop_cq *cq, const struct ib_wc *wc, bool solicited)
{
	lockdep_assert_held(&fabric.lock);
	if (cq->used == cq->ibcq.cqe) {
		/* Only a ULP that posts more than its CQ holds gets here. */
		pr_warn_ratelimited("ibloop: CQ overrun, completion lost\n");
		return;
	}
	cq->ring[(cq->head + cq->used) % cq->ibcq.cqe] = *wc;
	cq->used++;
	if (!cq->armed)
		return;
	if (cq->armed_solicited_only && !solicited && wc->status == IB_WC_SUCCESS)
		return;
	cq->armed = false;
	if (list_empty(&cq->ready))
		list_add_tail(&cq->ready, &fabric.ready);
	ibloop_switch_kick();
}

/* Drops the completions of a QP that goes away, so that no poll returns a stale pointer. */
void ibloop_cq_forget_qp(struct ibloop_cq *cq, const struct ib_qp *ibqp)
{
	unsigned int from, kept = 0;

	lockdep_assert_held(&fabric.lock);
	for (from = 0; from < cq->used; from++) {
		struct ib_wc *wc = &cq->ring[(cq->head + from) % cq->ibcq.cqe];

		if (wc->qp == ibqp)
			continue;
		if (kept != from)
			cq->ring[(cq->head + kept) % cq->ibcq.cqe] = *wc;
		kept++;
	}
	cq->used = kept;
}

/*
 * Calls the handlers that are due. Worker only. It does not hold the lock, because a handler posts
 * and polls. Bottom halves are disabled, as ULPs expect (NAPI is scheduled and runs at the end).
 */
void ibloop_cq_run_handlers(void)
{
	struct ibloop_cq *cq;
	unsigned long flags;

	spin_lock_irqsave(&fabric.lock, flags);
	while ((cq = list_first_entry_or_null(&fabric.ready, struct ibloop_cq, ready))) {
		list_del_init(&cq->ready);
		cq->calling = true;
		spin_unlock_irqrestore(&fabric.lock, flags);

		local_bh_disable();
		if (cq->ibcq.comp_handler)
			cq->ibcq.comp_handler(&cq->ibcq, cq->ibcq.cq_context);
		local_bh_enable();

		spin_lock_irqsave(&fabric.lock, flags);
		cq->calling = false;
		if (cq->idle)
			complete(cq->idle);	/* cq is gone from here */
	}
	spin_unlock_irqrestore(&fabric.lock, flags);
}

static int ibloop_create_cq(struct ib_cq *ibcq, const struct ib_cq_init_attr *attr,
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
			    struct uverbs_attr_bundle *user)
#else
			    struct ib_udata *user)
#endif
{
	struct ibloop_cq *cq = to_cq(ibcq);

	if (user)
		return -EOPNOTSUPP;
	if (attr->flags || !attr->cqe || attr->cqe > IBLOOP_MAX_CQE)
		return -EINVAL;
	cq->ring = kvcalloc(attr->cqe, sizeof(*cq->ring), GFP_KERNEL);
	if (!cq->ring)
		return -ENOMEM;
	ibcq->cqe = attr->cqe;
	INIT_LIST_HEAD(&cq->ready);
	return 0;
}

/* The core has made sure that no QP uses it any more. */
static int ibloop_destroy_cq(struct ib_cq *ibcq, struct ib_udata *udata)
{
	struct ibloop_cq *cq = to_cq(ibcq);
	DECLARE_COMPLETION_ONSTACK(idle);
	unsigned long flags;
	bool calling;

	spin_lock_irqsave(&fabric.lock, flags);
	list_del_init(&cq->ready);
	cq->armed = false;
	calling = cq->calling;
	if (calling)
		cq->idle = &idle;
	spin_unlock_irqrestore(&fabric.lock, flags);
	if (calling)
		wait_for_completion(&idle);
	kvfree(cq->ring);
	return 0;
}

static int ibloop_poll_cq(struct ib_cq *ibcq, int num_entries, struct ib_wc *wc)
{
	struct ibloop_cq *cq = to_cq(ibcq);
	unsigned long flags;
	int polled;

	spin_lock_irqsave(&fabric.lock, flags);
	for (polled = 0; polled < num_entries && cq->used; polled++) {
		wc[polled] = cq->ring[cq->head];
		cq->head = (cq->head + 1) % cq->ibcq.cqe;
		cq->used--;
	}
	spin_unlock_irqrestore(&fabric.lock, flags);
	return polled;
}

static int ibloop_req_notify_cq(struct ib_cq *ibcq, enum ib_cq_notify_flags notify)
{
	struct ibloop_cq *cq = to_cq(ibcq);
	unsigned long flags;
	int missed;

	spin_lock_irqsave(&fabric.lock, flags);
	cq->armed_solicited_only = (notify & IB_CQ_SOLICITED_MASK) == IB_CQ_SOLICITED &&
				   (!cq->armed || cq->armed_solicited_only);
	cq->armed = true;
	missed = (notify & IB_CQ_REPORT_MISSED_EVENTS) && cq->used;
	spin_unlock_irqrestore(&fabric.lock, flags);
	return missed;
}

const struct ib_device_ops ibloop_cq_ops = {
	.create_cq = ibloop_create_cq,
	.destroy_cq = ibloop_destroy_cq,
	.poll_cq = ibloop_poll_cq,
	.req_notify_cq = ibloop_req_notify_cq,
	INIT_RDMA_OBJ_SIZE(ib_cq, ibloop_cq, ibcq),
};
