"""rtnetlink's numbers and structs.

Sources: linux/rtnetlink.h, linux/if_link.h and linux/if_addr.h.
"""

import struct

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK = 16, 17, 18, 19
RTM_NEWADDR, RTM_GETADDR = 20, 22
RTM_NEWROUTE, RTM_GETROUTE = 24, 26
RTM_NEWLINKPROP, RTM_DELLINKPROP = 108, 109
RTEXT_FILTER_SKIP_STATS = 0x8

IFINFOMSG = struct.Struct("=BxHiII")  # family, type, index, flags, change
IFADDRMSG = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, index
# family, lengths of destination and source, tos, table, protocol, scope, type, flags
RTMSG = struct.Struct("=BBBBBBBBI")

IFLA_ADDRESS, IFLA_BROADCAST, IFLA_IFNAME, IFLA_MTU, IFLA_LINK = 1, 2, 3, 4, 5
IFLA_LINKINFO, IFLA_IFALIAS, IFLA_AF_SPEC, IFLA_NET_NS_FD, IFLA_EXT_MASK = 18, 20, 26, 28, 29
IFLA_PROP_LIST, IFLA_ALT_IFNAME, IFLA_PERM_ADDRESS, IFLA_PARENT_DEV_NAME = 52, 53, 54, 56
IFLA_INFO_KIND, IFLA_INFO_DATA = 1, 2
IFLA_IPOIB_PKEY, IFLA_IPOIB_MODE, IFLA_IPOIB_UMCAST = 1, 2, 3
IFLA_INET6_ADDR_GEN_MODE = 8

IFA_ADDRESS, IFA_LOCAL = 1, 2

RTA_DST, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_METRICS, RTA_TABLE = 1, 4, 5, 6, 8, 15
RTAX_MTU, RTAX_ADVMSS = 2, 8
