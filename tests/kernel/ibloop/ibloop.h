/* SPDX-License-Identifier: GPL-2.0 */
/*
 * ibloop: software InfiniBand HCAs on one in-memory switch.
 *
 * Locking: one spinlock, fabric.lock, guards everything that a packet can meet: port state and
 * P_Keys, QP state and queues, CQ rings, multicast attachments, the SA's groups. It is taken with
 * interrupts disabled, since verbs may be called from any context. Nothing is called back into
 * the core or a ULP with it held: completion handlers run from the worker, after it is dropped, and
 * events are queued by the core.
 */
#ifndef IBLOOP_H
#define IBLOOP_H

#include <linux/device.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/version.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_verbs.h>

#define IBLOOP_PORT		1
#define IBLOOP_MAX_HCAS		16
#define IBLOOP_MAX_VFS		8	/* of a PF */
#define IBLOOP_PKEYS		16	/* entries of a port's P_Key table */
#define IBLOOP_MAX_SGE		32	/* >= MAX_SKB_FRAGS + 1, so IPoIB need not linearise */
#define IBLOOP_MAX_WR		16384
#define IBLOOP_MAX_CQE		65536
#define IBLOOP_SM_LID		1	/* the subnet manager's own port; no HCA has it */
#define IBLOOP_FIRST_LID	16
#define IBLOOP_GRH_ROOM		40	/* in front of every UD receive */
#define IBLOOP_SUBNET_PREFIX	0xfe80000000000000ULL
#define IBLOOP_GUID_BASE	0x02001b1000000000ULL	/* EUI-64, locally administered */
#define IBLOOP_NO_GUID		~0ULL	/* a VF without a GUID, on ConnectX */
#define IBLOOP_FULL_MEMBER	0x8000

/* The counters of an HCA's traffic. A PF shows those of its VFs. */
enum ibloop_counter {
	IBLOOP_TX_PACKETS,
	IBLOOP_RX_PACKETS,
	IBLOOP_TX_BYTES,
	IBLOOP_RX_BYTES,
	IBLOOP_COUNTERS,
};

/* The condition for a VF's port to be up, like mlx5's port_state_policy. */
enum ibloop_policy {
	IBLOOP_FOLLOW,			/* when its PF's is: a new VF's */
	IBLOOP_UP,
	IBLOOP_DOWN,
};

/* The settings that a PF has made for one of its VFs. They outlive the VF and its driver's
 * binding. */
struct ibloop_vf {
	bool node_guid_set;
	bool port_guid_set;
	u64 node_guid;
	u64 port_guid;
	enum ibloop_policy policy;
};

struct ibloop_hca {
	struct ib_device ibdev;		/* first: ib_alloc_device() */
	unsigned int index;
	struct device *parent;		/* reference held */
	struct platform_device *platform;	/* the parent, unless it is a PCI function */
	u16 lid;
	__be64 node_guid;
	union ib_gid gid;
	struct xarray qps;		/* by QP number, the special ones too */
	u32 next_qpn;
	/* under fabric.lock */
	struct ibloop_hca *pf;		/* the PF of a VF, if our driver has it; it outlives the VF */
	unsigned int vf_index;
	struct ibloop_vf vfs[IBLOOP_MAX_VFS];	/* of a PF */
	bool plugged;			/* the "port" knob */
	bool up;			/* plugged, and up by its PF's policy */
	bool sa_on;			/* the "sa" knob */
	u16 pkeys[IBLOOP_PKEYS];	/* 0: empty */
	u32 port_cap_flags;
	u64 counters[IBLOOP_COUNTERS];
};

struct ibloop_cq {
	struct ib_cq ibcq;
	struct list_head ready;		/* in fabric.ready: handler is due */
	bool armed;
	bool armed_solicited_only;
	bool calling;			/* the worker is in the completion handler */
	struct completion *idle;	/* destroy waits here for the worker */
	unsigned int head;		/* oldest entry */
	unsigned int used;
	struct ib_wc *ring;		/* ibcq.cqe entries */
};

struct ibloop_rwqe {
	u64 wr_id;
	unsigned int num_sge;
};

struct ibloop_qp {
	struct ib_qp ibqp;
	enum ib_qp_state state;
	struct ib_qp_cap cap;
	enum ib_sig_type sig_type;
	bool block_loopback;
	u16 pkey_index;
	u32 qkey;
	u32 sends;			/* posted and not completed */
	/* receive queue: a ring of cap.max_recv_wr, sges beside it */
	struct ibloop_rwqe *rq;
	struct ib_sge *rq_sges;
	u32 rq_head;
	u32 rq_used;
	struct list_head attachments;	/* ibloop_attachment.of_qp */
};

/* One QP attached to one multicast group. */
struct ibloop_attachment {
	struct list_head of_qp;
	struct list_head of_fabric;
	struct ibloop_qp *qp;
	union ib_gid mgid;
	u16 mlid;
};

struct ibloop_ah {
	struct ib_ah ibah;
	struct rdma_ah_attr attr;	/* grh.sgid_attr cleared: the core holds that reference */
};

struct ibloop_pd {
	struct ib_pd ibpd;
};

struct ibloop_ucontext {
	struct ib_ucontext ibucontext;
};

/* A message in flight: the contents of its headers, and the payload. */
struct ibloop_packet {
	struct list_head queue;
	struct ibloop_qp *sender;	/* NULL: from the SA; a QP's packets go before it does */
	/* the sender's completion */
	u64 wr_id;
	bool signaled;
	/* headers */
	u16 slid;
	u16 dlid;
	u16 pkey;
	u8 sl;
	bool has_grh;
	bool solicited;
	bool has_imm;
	__be32 imm;
	u32 src_qpn;
	u32 dest_qpn;
	u32 qkey;
	struct ib_grh grh;
	u32 length;
	u8 payload[];
};

struct ibloop_fabric {
	spinlock_t lock;
	struct ibloop_hca *hcas[IBLOOP_MAX_HCAS];
	struct list_head packets;
	struct list_head ready;		/* CQs whose handler is due */
	struct list_head attachments;
	struct workqueue_struct *wq;
	struct work_struct work;
};

extern struct ibloop_fabric fabric;
extern enum ib_mtu ibloop_mtu;	/* of every port, path and group */
extern bool ibloop_vf_guids;
extern u16 ibloop_pkeys[IBLOOP_PKEYS];	/* of every port without another partition */
extern const struct attribute_group ibloop_knobs;
extern const struct ib_device_ops ibloop_port_ops;
extern const struct ib_device_ops ibloop_cq_ops;
extern const struct ib_device_ops ibloop_qp_ops;
extern const struct ib_device_ops ibloop_pf_ops;
extern const struct ib_device_ops ibloop_stats_ops;

static inline struct ibloop_hca *to_hca(struct ib_device *ibdev)
{
	return container_of(ibdev, struct ibloop_hca, ibdev);
}

static inline struct ibloop_cq *to_cq(struct ib_cq *ibcq)
{
	return container_of(ibcq, struct ibloop_cq, ibcq);
}

static inline struct ibloop_qp *to_qp(struct ib_qp *ibqp)
{
	return container_of(ibqp, struct ibloop_qp, ibqp);
}

static inline struct ibloop_ah *to_ah(struct ib_ah *ibah)
{
	return container_of(ibah, struct ibloop_ah, ibah);
}

/* Two P_Keys can talk: same partition, and at least one of them a full member. */
static inline bool ibloop_pkeys_match(u16 a, u16 b)
{
	return (a & ~IBLOOP_FULL_MEMBER) && !((a ^ b) & ~IBLOOP_FULL_MEMBER) &&
	       ((a | b) & IBLOOP_FULL_MEMBER);
}

/* main.c */
struct ibloop_hca *ibloop_add_hca(struct device *parent, struct platform_device *platform);
void ibloop_remove_hca(struct ibloop_hca *hca);

/* sriov.c */
int ibloop_sriov_init(void);
void ibloop_sriov_exit(void);
bool ibloop_is_vf(const struct ibloop_hca *hca);
void ibloop_become_vf(struct ibloop_hca *hca);
u64 ibloop_function_id(const struct ibloop_hca *hca);

/* port.c */
void ibloop_event(struct ibloop_hca *hca, enum ib_event_type type);
bool ibloop_port_is_up(const struct ibloop_hca *hca);
void ibloop_update_ports(void);

/* Index of the entry of @hca's table that matches @pkey, or -1. */
int ibloop_find_pkey(const struct ibloop_hca *hca, u16 pkey);

/* cq.c */
void ibloop_cq_push(struct ibloop_cq *cq, const struct ib_wc *wc, bool solicited);
void ibloop_cq_forget_qp(struct ibloop_cq *cq, const struct ib_qp *ibqp);
void ibloop_cq_run_handlers(void);

/* qp.c */
bool ibloop_qp_receives(const struct ibloop_qp *qp);
void ibloop_complete_send(struct ibloop_qp *qp, u64 wr_id, bool signaled,
			  enum ib_wc_status status);
void ibloop_flush_recvs(struct ibloop_qp *qp);

/* sm.c */
void ibloop_fill_pkeys(struct ibloop_hca *hca);

/* switch.c */
int ibloop_switch_init(void);
void ibloop_switch_exit(void);
struct ibloop_hca *ibloop_hca_by_lid(u16 lid);
struct ibloop_hca *ibloop_hca_by_guid(__be64 guid);
void ibloop_switch_kick(void);
void ibloop_switch_send(struct ibloop_packet *packet);
void ibloop_switch_purge(struct ibloop_qp *qp, bool complete);

/* sa.c: the subnet administrator, called by the worker with fabric.lock held */
void ibloop_sa_receive(struct ibloop_hca *requester, const struct ibloop_packet *packet);
void ibloop_sa_forget_port(const struct ibloop_hca *hca);
void ibloop_sa_exit(void);

#endif
