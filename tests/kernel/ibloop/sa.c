// SPDX-License-Identifier: GPL-2.0
/*
 * The subnet administrator, as far as IPoIB and the CM need one (IBA volume 1, chapter 15). It
 * joins and leaves multicast groups (MCMemberRecord), finds paths (PathRecord), and reports its
 * capabilities (ClassPortInfo). Everything here runs in the worker with fabric.lock held.
 */
#include <linux/idr.h>
#include <rdma/ib_sa.h>

#include "ibloop.h"

#define IBLOOP_IPOIB_QKEY	0x0b1b
#define IBLOOP_RATE		IB_RATE_100_GBPS
#define IBLOOP_LIFETIME		18
#define IBLOOP_EXACTLY(value)	(IB_SA_EQ << 6 | (value))
#define IBLOOP_FULL_JOINS	(BIT(FULLMEMBER_JOIN) | BIT(SENDONLY_FULLMEMBER_JOIN))

/* MAD status, the SA's own codes (IBA 15.2.2.2): in the upper byte. */
enum {
	SA_OK = 0,
	SA_NO_RESOURCES = 0x0100,
	SA_REQ_INVALID = 0x0200,
	SA_NO_RECORDS = 0x0300,
	SA_REQ_INSUFFICIENT = 0x0600,
	SA_REQ_DENIED = 0x0700,
};

struct sa_mcmember {
	union ib_gid mgid;
	union ib_gid port_gid;
	__be32 qkey;
	__be16 mlid;
	u8 mtu;			/* selector in the upper two bits, here and below */
	u8 traffic_class;
	__be16 pkey;
	u8 rate;
	u8 lifetime;
	__be32 sl_flow_hop;
	u8 scope_join;
	u8 proxy_join;
	u8 reserved[2];
} __packed;

struct sa_path {
	__be64 service_id;
	union ib_gid dgid;
	union ib_gid sgid;
	__be16 dlid;
	__be16 slid;
	__be32 raw_flow_hop;
	u8 traffic_class;
	u8 reversible_numb;
	__be16 pkey;
	__be16 qos_sl;
	u8 mtu;
	u8 rate;
	u8 lifetime;
	u8 preference;
	u8 reserved[6];
} __packed;

static_assert(sizeof(struct sa_mcmember) == 52);
static_assert(sizeof(struct sa_path) == 64);

struct sa_group {
	struct list_head list;
	struct sa_mcmember record;	/* port_gid and the join state are filled per answer */
	u8 joins[IBLOOP_MAX_HCAS];	/* join state of each HCA's port */
};

static LIST_HEAD(sa_groups);
static DEFINE_IDA(sa_mlids);

static struct sa_group *sa_find_group(const union ib_gid *mgid)
{
	struct sa_group *group;

	list_for_each_entry(group, &sa_groups, list)
		if (!memcmp(&group->record.mgid, mgid, sizeof(*mgid)))
			return group;
	return NULL;
}

static void sa_free_group(struct sa_group *group)
{
	list_del(&group->list);
	ida_free(&sa_mlids, be16_to_cpu(group->record.mlid));
	kfree(group);
}

/* A group lives as long as it has a full member. */
static void sa_reap_group(struct sa_group *group)
{
	unsigned int i;

	for (i = 0; i < IBLOOP_MAX_HCAS; i++)
		if (group->joins[i] & IBLOOP_FULL_JOINS)
			return;
	sa_free_group(group);
}

/* ff1x:401b:<P_Key>::ffff:ffff, RFC 4391 section 4: the administrator makes it, not a join. */
static bool sa_is_ipv4_broadcast(const union ib_gid *mgid)
{
	static const u8 zeros[6], ones[4] = { 0xff, 0xff, 0xff, 0xff };

	return mgid->raw[0] == 0xff && mgid->raw[2] == 0x40 && mgid->raw[3] == 0x1b &&
	       !memcmp(&mgid->raw[6], zeros, sizeof(zeros)) &&
	       !memcmp(&mgid->raw[12], ones, sizeof(ones));
}

static struct sa_group *sa_create_group(const struct sa_mcmember *asked)
{
	bool broadcast = sa_is_ipv4_broadcast(&asked->mgid);
	struct sa_group *group;
	int mlid;

	group = kzalloc(sizeof(*group), GFP_ATOMIC);
	if (!group)
		return NULL;
	mlid = ida_alloc_range(&sa_mlids, be16_to_cpu(IB_MULTICAST_LID_BASE), 0xfffe, GFP_ATOMIC);
	if (mlid < 0) {
		kfree(group);
		return NULL;
	}
	group->record.mgid = asked->mgid;
	group->record.mlid = cpu_to_be16(mlid);
	if (broadcast) {
		group->record.qkey = cpu_to_be32(IBLOOP_IPOIB_QKEY);
		group->record.pkey = cpu_to_be16(IBLOOP_FULL_MEMBER | asked->mgid.raw[4] << 8 |
						 asked->mgid.raw[5]);
	} else {
		group->record.qkey = asked->qkey;
		group->record.pkey = asked->pkey | cpu_to_be16(IBLOOP_FULL_MEMBER);
		group->record.traffic_class = asked->traffic_class;
		group->record.sl_flow_hop = asked->sl_flow_hop;
	}
	group->record.mtu = IBLOOP_EXACTLY(ibloop_mtu);
	group->record.rate = IBLOOP_EXACTLY(IBLOOP_RATE);
	group->record.lifetime = IBLOOP_EXACTLY(IBLOOP_LIFETIME);
	group->record.scope_join = (asked->mgid.raw[1] & 0xf) << 4;
	list_add_tail(&group->list, &sa_groups);
	return group;
}

static void sa_fill_mcmember(struct sa_mcmember *record, const struct sa_group *group,
			     const struct ibloop_hca *hca)
{
	*record = group->record;
	record->port_gid = hca->gid;
	record->scope_join |= group->joins[hca->index];
}

static u16 sa_join(const struct ibloop_hca *hca, struct sa_mcmember *record, ib_sa_comp_mask mask)
{
	const ib_sa_comp_mask need = IB_SA_MCMEMBER_REC_MGID | IB_SA_MCMEMBER_REC_JOIN_STATE;
	const ib_sa_comp_mask to_create = IB_SA_MCMEMBER_REC_QKEY | IB_SA_MCMEMBER_REC_PKEY;
	u8 join = record->scope_join & 0xf;
	struct sa_group *group;
	u16 pkey;

	if ((mask & need) != need || !join)
		return SA_REQ_INSUFFICIENT;
	if (record->mgid.raw[0] != 0xff)
		return SA_REQ_INVALID;
	group = sa_find_group(&record->mgid);
	if (group) {
		pkey = be16_to_cpu(group->record.pkey);
		if ((mask & IB_SA_MCMEMBER_REC_QKEY) && record->qkey != group->record.qkey)
			return SA_REQ_INVALID;
	} else if (sa_is_ipv4_broadcast(&record->mgid)) {
		pkey = IBLOOP_FULL_MEMBER | record->mgid.raw[4] << 8 | record->mgid.raw[5];
	} else if ((mask & to_create) == to_create && (join & IBLOOP_FULL_JOINS)) {
		pkey = IBLOOP_FULL_MEMBER | be16_to_cpu(record->pkey);
	} else {
		return SA_REQ_INVALID;
	}
	if ((mask & IB_SA_MCMEMBER_REC_PKEY) &&
	    (be16_to_cpu(record->pkey) | IBLOOP_FULL_MEMBER) != pkey)
		return SA_REQ_INVALID;
	if (ibloop_find_pkey(hca, pkey) < 0)
		return SA_REQ_DENIED;
	if (!group)
		group = sa_create_group(record);
	if (!group)
		return SA_NO_RESOURCES;
	group->joins[hca->index] |= join;
	sa_fill_mcmember(record, group, hca);
	return SA_OK;
}

static u16 sa_leave(const struct ibloop_hca *hca, struct sa_mcmember *record, ib_sa_comp_mask mask)
{
	struct sa_group *group = sa_find_group(&record->mgid);
	u8 leave = record->scope_join & 0xf;

	if (!group || !(group->joins[hca->index] & leave))
		return SA_REQ_INVALID;
	group->joins[hca->index] &= ~leave;
	sa_fill_mcmember(record, group, hca);
	sa_reap_group(group);
	return SA_OK;
}

static u16 sa_get_mcmember(const struct ibloop_hca *hca, struct sa_mcmember *record)
{
	struct sa_group *group = sa_find_group(&record->mgid);

	if (!group || ibloop_find_pkey(hca, be16_to_cpu(group->record.pkey)) < 0)
		return SA_NO_RECORDS;
	sa_fill_mcmember(record, group, hca);
	return SA_OK;
}

/* A P_Key of @a that can talk with @b, in the partition of @asked unless that is 0; or 0. */
static u16 sa_common_pkey(const struct ibloop_hca *a, const struct ibloop_hca *b, u16 asked)
{
	unsigned int i;

	for (i = 0; i < IBLOOP_PKEYS; i++) {
		if (asked && ((asked ^ a->pkeys[i]) & ~IBLOOP_FULL_MEMBER))
			continue;
		if (ibloop_find_pkey(b, a->pkeys[i]) >= 0)
			return a->pkeys[i];
	}
	return 0;
}

static u16 sa_get_path(const struct ibloop_hca *requester, struct sa_path *path,
		       ib_sa_comp_mask mask)
{
	const struct ibloop_hca *from = requester, *to = NULL;
	u16 pkey;

	if (mask & IB_SA_PATH_REC_SGID)
		from = ibloop_hca_by_guid(path->sgid.global.interface_id);
	if (mask & IB_SA_PATH_REC_DGID)
		to = ibloop_hca_by_guid(path->dgid.global.interface_id);
	else if (mask & IB_SA_PATH_REC_DLID)
		to = ibloop_hca_by_lid(be16_to_cpu(path->dlid));
	else
		return SA_REQ_INSUFFICIENT;
	if (!from || !to || !from->up || !to->up)
		return SA_NO_RECORDS;
	pkey = sa_common_pkey(from, to, mask & IB_SA_PATH_REC_PKEY ? be16_to_cpu(path->pkey) : 0);
	if (!pkey)
		return SA_NO_RECORDS;
	path->dgid = to->gid;
	path->sgid = from->gid;
	path->dlid = cpu_to_be16(to->lid);
	path->slid = cpu_to_be16(from->lid);
	path->raw_flow_hop = 0;		/* hop limit 0: no router, so no GRH on unicast */
	path->traffic_class = 0;
	path->reversible_numb = 0x80 | 1;
	path->pkey = cpu_to_be16(pkey);
	path->qos_sl = 0;
	path->mtu = IBLOOP_EXACTLY(ibloop_mtu);
	path->rate = IBLOOP_EXACTLY(IBLOOP_RATE);
	path->lifetime = IBLOOP_EXACTLY(IBLOOP_LIFETIME);
	path->preference = 0;
	return SA_OK;
}

static u16 sa_get_class_port_info(struct ib_class_port_info *info)
{
	memset(info, 0, sizeof(*info));
	info->base_version = IB_MGMT_BASE_VERSION;
	info->class_version = IB_SA_CLASS_VERSION;
	ib_set_cpi_capmask2(info, IB_SA_CAP_MASK2_SENDONLY_FULL_MEM_SUPPORT);
	ib_set_cpi_resp_time(info, IBLOOP_LIFETIME);
	return SA_OK;
}

/* Turns the request @mad into its answer's body and returns the status. */
static u16 sa_answer(const struct ibloop_hca *requester, struct ib_sa_mad *mad)
{
	ib_sa_comp_mask mask = mad->sa_hdr.comp_mask;
	u8 method = mad->mad_hdr.method;

	switch (be16_to_cpu(mad->mad_hdr.attr_id)) {
	case IB_SA_ATTR_MC_MEMBER_REC:
		if (method == IB_MGMT_METHOD_SET)
			return sa_join(requester, (struct sa_mcmember *)mad->data, mask);
		if (method == IB_SA_METHOD_DELETE)
			return sa_leave(requester, (struct sa_mcmember *)mad->data, mask);
		if (method == IB_MGMT_METHOD_GET)
			return sa_get_mcmember(requester, (struct sa_mcmember *)mad->data);
		break;
	case IB_SA_ATTR_PATH_REC:
		if (method == IB_MGMT_METHOD_GET)
			return sa_get_path(requester, (struct sa_path *)mad->data, mask);
		break;
	case IB_SA_ATTR_CLASS_PORTINFO:
		if (method == IB_MGMT_METHOD_GET)
			return sa_get_class_port_info((struct ib_class_port_info *)mad->data);
		break;
	}
	return IB_MGMT_MAD_STATUS_UNSUPPORTED_METHOD_ATTRIB;
}

/* The headers of the reply; the body is still the request's. */
static struct ibloop_packet *sa_reply_to(const struct ibloop_packet *request)
{
	struct ibloop_packet *reply;

	reply = kzalloc(struct_size(reply, payload, sizeof(struct ib_sa_mad)), GFP_ATOMIC);
	if (!reply)
		return NULL;
	reply->slid = IBLOOP_SM_LID;
	reply->dlid = request->slid;
	reply->pkey = IB_DEFAULT_PKEY_FULL;
	reply->src_qpn = 1;
	reply->dest_qpn = request->src_qpn;
	reply->qkey = IB_QP1_QKEY;
	/* The MAD layer accepts a reply with a GRH only if the request had one, and the reverse. */
	reply->has_grh = request->has_grh;
	reply->grh = request->grh;
	swap(reply->grh.sgid, reply->grh.dgid);
	reply->length = sizeof(struct ib_sa_mad);
	memcpy(reply->payload, request->payload, sizeof(struct ib_sa_mad));
	return reply;
}

void ibloop_sa_receive(struct ibloop_hca *requester, const struct ibloop_packet *request)
{
	struct ibloop_packet *reply;
	struct ib_sa_mad *mad;
	u16 status;

	lockdep_assert_held(&fabric.lock);
	if (!requester->sa_on || !ibloop_pkeys_match(request->pkey, IB_DEFAULT_PKEY_FULL))
		return;
	mad = (struct ib_sa_mad *)request->payload;
	if (request->length < sizeof(*mad) || mad->mad_hdr.mgmt_class != IB_MGMT_CLASS_SUBN_ADM ||
	    (mad->mad_hdr.method & IB_MGMT_METHOD_RESP) ||
	    mad->mad_hdr.method == IB_MGMT_METHOD_TRAP)
		return;
	reply = sa_reply_to(request);
	if (!reply)
		return;		/* as if lost: the requester tries again */
	mad = (struct ib_sa_mad *)reply->payload;
	status = sa_answer(requester, mad);
	if (mad->mad_hdr.method == IB_MGMT_METHOD_SET)
		mad->mad_hdr.method = IB_MGMT_METHOD_GET_RESP;
	else
		mad->mad_hdr.method |= IB_MGMT_METHOD_RESP;
	mad->mad_hdr.status = cpu_to_be16(status);
	ibloop_switch_send(reply);
}

/* A port that goes down or away is a member of no group. */
void ibloop_sa_forget_port(const struct ibloop_hca *hca)
{
	struct sa_group *group, *next;

	lockdep_assert_held(&fabric.lock);
	list_for_each_entry_safe(group, next, &sa_groups, list) {
		group->joins[hca->index] = 0;
		sa_reap_group(group);
	}
}

void ibloop_sa_exit(void)
{
	struct sa_group *group, *next;

	list_for_each_entry_safe(group, next, &sa_groups, list)
		sa_free_group(group);
	ida_destroy(&sa_mlids);
}
