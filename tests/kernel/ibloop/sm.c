// SPDX-License-Identifier: GPL-2.0
/*
 * The subnet manager's partitions of ports by their GUIDs: the parameter "members".
 *
 * As with UFM or OpenSM's "indx0", a member has its P_Key at index 0, which IPoIB uses for the
 * port's own interface. A port need not exist yet.
 */
#include <linux/moduleparam.h>

#include "ibloop.h"

static struct {
	__be64 guid;
	u16 pkey;			/* 0: a free entry */
} members[IBLOOP_MAX_HCAS];

/* The P_Key table of a port, by its GUID. A member has its own P_Key, and the SA's as a limited
 * member. */
void ibloop_fill_pkeys(struct ibloop_hca *hca)
{
	unsigned int i;

	lockdep_assert_held(&fabric.lock);
	memcpy(hca->pkeys, ibloop_pkeys, sizeof(hca->pkeys));
	for (i = 0; i < ARRAY_SIZE(members); i++) {
		if (!members[i].pkey || members[i].guid != hca->gid.global.interface_id)
			continue;
		memset(hca->pkeys, 0, sizeof(hca->pkeys));
		hca->pkeys[0] = members[i].pkey;
		hca->pkeys[1] = IB_DEFAULT_PKEY_PARTIAL;
		break;
	}
}

static int ibloop_set_member(__be64 guid, u16 pkey)
{
	int place = -1;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(members); i++) {
		if (members[i].pkey && members[i].guid == guid) {
			place = i;
			break;
		}
		if (!members[i].pkey && place < 0)
			place = i;
	}
	if (place < 0)
		return -ENOSPC;
	members[place].guid = guid;
	members[place].pkey = pkey;
	for (i = 0; i < IBLOOP_MAX_HCAS; i++) {
		struct ibloop_hca *hca = fabric.hcas[i];

		if (!hca || hca->gid.global.interface_id != guid)
			continue;
		ibloop_fill_pkeys(hca);
		ibloop_event(hca, IB_EVENT_PKEY_CHANGE);
	}
	return 0;
}

/* "GUID PKEY", two hexadecimal numbers; a P_Key of 0 ends the membership. */
static int members_set(const char *text, const struct kernel_param *param)
{
	unsigned long flags;
	unsigned int pkey;
	u64 guid;
	int err;

	/* The fabric does not exist yet while the module starts. */
	if (!fabric.wq || sscanf(text, "%llx %x", &guid, &pkey) != 2 || pkey > U16_MAX)
		return -EINVAL;
	spin_lock_irqsave(&fabric.lock, flags);
	err = ibloop_set_member(cpu_to_be64(guid), pkey);
	spin_unlock_irqrestore(&fabric.lock, flags);
	return err;
}

static int members_get(char *buf, const struct kernel_param *param)
{
	unsigned long flags;
	int length = 0;
	unsigned int i;

	spin_lock_irqsave(&fabric.lock, flags);
	for (i = 0; i < ARRAY_SIZE(members); i++)
		if (members[i].pkey)
			length += sysfs_emit_at(buf, length, "0x%016llx 0x%04x\n",
						be64_to_cpu(members[i].guid), members[i].pkey);
	spin_unlock_irqrestore(&fabric.lock, flags);
	return length;
}

static const struct kernel_param_ops members_ops = {
	.set = members_set,
	.get = members_get,
};
module_param_cb(members, &members_ops, NULL, 0644);
MODULE_PARM_DESC(members, "\"GUID PKEY\": ports with that GUID have that P_Key at index 0");
