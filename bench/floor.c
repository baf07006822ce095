/*
 * The kernel's own work for one attachment, without any plugin: what no plugin can be faster than.
 *
 *   floor add NETNS DEVICE NAME ADDRESS/PREFIX
 *   floor del NETNS DEVICE NAME ADDRESS/PREFIX
 *
 * ADD moves and renames a netdev that exists, gives it an address and sets it up. DEL moves it back
 * under its name. NETNS is a path, ADDRESS one of IPv4. On standard output, as JSON: the nanoseconds
 * from opening NETNS to the last answer, and those of CPU. Messages as in rtnetlink(7); exit code 1
 * with errno's text on failure.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_link.h>
#include <linux/rtnetlink.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct request {
    struct nlmsghdr header;
    char rest[1024];
};

static void fail(const char *what)
{
    fprintf(stderr, "floor: %s: %s\n", what, strerror(errno));
    exit(1);
}

static long long now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int netlink_socket(void)
{
    int made = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    if (made < 0)
        fail("netlink socket");
    return made;
}

static void *begin(struct request *request, int type, int flags, size_t size)
{
    memset(request, 0, sizeof(*request));
    request->header.nlmsg_len = NLMSG_LENGTH(size);
    request->header.nlmsg_type = type;
    request->header.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | flags;
    return NLMSG_DATA(&request->header);
}

static void add(struct request *request, int type, const void *payload, size_t size)
{
    struct rtattr *attribute =
        (struct rtattr *)((char *)request + NLMSG_ALIGN(request->header.nlmsg_len));
    attribute->rta_type = type;
    attribute->rta_len = RTA_LENGTH(size);
    if (size)
        memcpy(RTA_DATA(attribute), payload, size);
    request->header.nlmsg_len =
        NLMSG_ALIGN(request->header.nlmsg_len) + RTA_ALIGN(attribute->rta_len);
}

static void tell(int route, struct request *request, const char *what)
{
    char answer[8192];
    struct nlmsghdr *header = (struct nlmsghdr *)answer;
    if (send(route, request, request->header.nlmsg_len, 0) < 0)
        fail(what);
    if (recv(route, answer, sizeof(answer), 0) < 0)
        fail(what);
    errno = EPROTO;
    if (header->nlmsg_type == NLMSG_ERROR)
        errno = -((struct nlmsgerr *)NLMSG_DATA(header))->error;
    if (errno)
        fail(what);
}

/* The interface of that name in the namespace of the socket. */
static int look(int route, const char *name)
{
    struct request request;
    char answer[16384];
    struct nlmsghdr *header = (struct nlmsghdr *)answer;
    struct ifinfomsg *link = begin(&request, RTM_GETLINK, 0, sizeof(*link));
    unsigned mask = RTEXT_FILTER_SKIP_STATS;
    request.header.nlmsg_flags = NLM_F_REQUEST;
    add(&request, IFLA_EXT_MASK, &mask, sizeof(mask));
    add(&request, IFLA_IFNAME, name, strlen(name) + 1);
    if (send(route, &request, request.header.nlmsg_len, 0) < 0 ||
        recv(route, answer, sizeof(answer), 0) < 0)
        fail("looking up a link");
    if (header->nlmsg_type != RTM_NEWLINK) {
        errno = -((struct nlmsgerr *)NLMSG_DATA(header))->error;
        fail(name);
    }
    link = NLMSG_DATA(header);
    return link->ifi_index;
}

static void move(int route, int index, int target, const char *name)
{
    struct request request;
    struct ifinfomsg *link = begin(&request, RTM_SETLINK, 0, sizeof(*link));
    link->ifi_index = index;
    add(&request, IFLA_NET_NS_FD, &target, sizeof(target));
    add(&request, IFLA_IFNAME, name, strlen(name) + 1);
    tell(route, &request, "moving");
}

static void give_address(int route, int index, const char *text)
{
    struct request request;
    struct in_addr address;
    char plain[INET_ADDRSTRLEN];
    const char *slash = strchr(text, '/');
    struct ifaddrmsg *message;
    snprintf(plain, sizeof(plain), "%.*s", slash ? (int)(slash - text) : 0, text);
    if (inet_pton(AF_INET, plain, &address) != 1) {
        errno = EINVAL;
        fail(text);
    }
    message = begin(&request, RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, sizeof(*message));
    message->ifa_family = AF_INET;
    message->ifa_prefixlen = atoi(slash + 1);
    message->ifa_index = index;
    add(&request, IFA_LOCAL, &address, sizeof(address));
    add(&request, IFA_ADDRESS, &address, sizeof(address));
    tell(route, &request, "giving an address");
}

static void set_up(int route, int index)
{
    struct request request;
    struct ifinfomsg *link = begin(&request, RTM_SETLINK, 0, sizeof(*link));
    link->ifi_index = index;
    link->ifi_flags = link->ifi_change = IFF_UP;
    tell(route, &request, "setting up");
}

int main(int argc, char **argv)
{
    if (argc != 6) {
        fprintf(stderr, "usage: floor add|del NETNS DEVICE NAME ADDRESS\n");
        return 2;
    }
    const char *device = argv[3], *name = argv[4];
    long long started = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    int target = open(argv[2], O_RDONLY | O_CLOEXEC);
    int host = netlink_socket();
    if (home < 0 || target < 0 || setns(target, CLONE_NEWNET) < 0)
        fail(argv[2]);
    int pod = netlink_socket();
    if (setns(home, CLONE_NEWNET) < 0)
        fail("setns");
    if (!strcmp(argv[1], "add")) {
        move(host, look(host, device), target, name);
        int index = look(pod, name);
        give_address(pod, index, argv[5]);
        set_up(pod, index);
    } else {
        move(pod, look(pod, name), home, device);
    }
    printf("{\"wall\": %lld, \"cpu\": %lld}\n", now(CLOCK_MONOTONIC) - started,
           now(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    return 0;
}
