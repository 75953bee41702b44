// floor does the least that the kernel must be asked for to give one pod its
// network, and nothing else. It is the yardstick of the benchmark: what a CNI
// plugin takes beyond it is the plugin's own doing.
//
// It reads no configuration, allocates no address, writes no file, touches no
// firewall and looks nothing up that it is not told, except two interface
// indexes. Started as a CNI plugin is, it obeys CNI_COMMAND:
//
//   ADD  veth pair (CNI_IFNAME in CNI_NETNS, the host's end on the bridge),
//        loopback up, address, default route
//   DEL  delete the host's end, whose name is a hash of CNI_CONTAINERID and
//        CNI_IFNAME
//
//   floor -bridge NAME -address A/P -gateway A [-address6 A/P -gateway6 A]
//
// With -setup it makes the bridge with the gateways' addresses on it and ends.
// With -loop it does in this one process what it is told on standard input, and
// prints the nanoseconds of each: the kernel's work without exec, what an
// in-process attach is to be compared with.
//
// Build: cc -O2 -static -o floor floor.c. Needs Linux 4.11 and CAP_NET_ADMIN and
// CAP_SYS_ADMIN (setns).
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <linux/if_addr.h>
#include <linux/if_link.h>
#include <linux/rtnetlink.h>
#include <linux/veth.h>
#include <net/if.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LOOPBACK = 1 }; // the index of lo in every namespace

struct address {
	int family; // AF_INET, AF_INET6, or 0 for none
	uint8_t ip[16];
	uint8_t prefix; // bits
};

struct network {
	const char *bridge;
	uint32_t mtu; // bytes
	struct address address, gateway, address6, gateway6;
};

// pod names one attachment. Names and MACs come from a hash of the identity, so
// DEL needs nothing that ADD would have to remember.
struct pod {
	char host[IFNAMSIZ]; // the host's end
	const char *ifname;  // the pod's end
	uint8_t host_mac[6], mac[6];
};

// batch is a run of netlink messages that go to the kernel in one sendmsg.
struct batch {
	_Alignas(NLMSG_ALIGNTO) char buf[2048];
	size_t len;
	struct nlmsghdr *last;
};

static void die(const char *format, ...)
{
	int err = errno;
	va_list args;

	fputs("floor: ", stderr);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fprintf(stderr, ": %s\n", strerror(err));
	exit(1);
}

// --- netlink messages ---

static void *reserve(struct batch *b, size_t size)
{
	void *at = b->buf + b->len;

	if (b->len + NLMSG_ALIGN(size) > sizeof b->buf) {
		errno = ENOBUFS;
		die("build netlink message");
	}
	memset(at, 0, NLMSG_ALIGN(size));
	b->len += NLMSG_ALIGN(size);
	if (b->last)
		b->last->nlmsg_len = b->buf + b->len - (char *)b->last;
	return at;
}

// start begins a message and returns its family header, of the given size. Only
// the last message of a batch asks for an ACK (see submit): the kernel reports an
// error of any message unasked.
static void *start(struct batch *b, uint16_t type, uint16_t flags, size_t header)
{
	struct nlmsghdr *message;

	b->last = NULL;
	message = reserve(b, sizeof *message);
	b->last = message;
	message->nlmsg_type = type;
	message->nlmsg_flags = NLM_F_REQUEST | flags;
	return reserve(b, header);
}

static struct rtattr *attr(struct batch *b, uint16_t type, const void *data, size_t len)
{
	struct rtattr *a = reserve(b, RTA_LENGTH(len));

	a->rta_type = type;
	a->rta_len = RTA_LENGTH(len);
	if (len)
		memcpy(RTA_DATA(a), data, len);
	return a;
}

static void attr_u32(struct batch *b, uint16_t type, uint32_t value)
{
	attr(b, type, &value, sizeof value);
}

static void attr_str(struct batch *b, uint16_t type, const char *value)
{
	attr(b, type, value, strlen(value) + 1);
}

static struct rtattr *nest(struct batch *b, uint16_t type)
{
	return attr(b, type, NULL, 0);
}

static void nest_end(struct batch *b, struct rtattr *a)
{
	a->rta_len = b->buf + b->len - (char *)a;
}

// submit sends the batch and waits for the last message's ACK. An earlier
// message's error is queued before it.
static void submit(int sock, struct batch *b, const char *what)
{
	_Alignas(NLMSG_ALIGNTO) char buf[4096];
	struct nlmsghdr *reply = (struct nlmsghdr *)buf;
	ssize_t n;

	b->last->nlmsg_flags |= NLM_F_ACK;
	if (send(sock, b->buf, b->len, 0) < 0)
		die("%s: send", what);
	n = recv(sock, buf, sizeof buf, 0);
	if (n < 0 || !NLMSG_OK(reply, n) || reply->nlmsg_type != NLMSG_ERROR)
		die("%s: receive", what);
	errno = -((struct nlmsgerr *)NLMSG_DATA(reply))->error;
	if (errno)
		die("%s", what);
}

static int dial(void)
{
	int sock = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);

	if (sock < 0)
		die("open netlink socket");
	return sock;
}

// link_index asks by ioctl, which any socket takes, in the socket's namespace: no
// message, no lock, no dump.
static int link_index(int sock, const char *name)
{
	struct ifreq request = {0};

	strncpy(request.ifr_name, name, IFNAMSIZ - 1);
	if (ioctl(sock, SIOCGIFINDEX, &request) < 0)
		die("find link %s", name);
	return request.ifr_ifindex;
}

// --- the pieces of an attachment ---

static size_t ip_len(const struct address *a)
{
	return a->family == AF_INET6 ? 16 : 4;
}

static void put_up(struct batch *b, int index)
{
	struct ifinfomsg *link = start(b, RTM_NEWLINK, 0, sizeof *link);

	link->ifi_index = index;
	link->ifi_flags = link->ifi_change = IFF_UP;
}

// put_no_link_local keeps the kernel from giving the link an IPv6 address. A pod
// without IPv6 would otherwise flood its solicitations to every port of the bridge,
// which is most of what an ADD costs beside many pods. It must come before IFF_UP.
static void put_no_link_local(struct batch *b, int index)
{
	struct ifinfomsg *link = start(b, RTM_SETLINK, 0, sizeof *link);
	struct rtattr *spec, *inet6;
	uint8_t mode = IN6_ADDR_GEN_MODE_NONE;

	link->ifi_index = index;
	spec = nest(b, IFLA_AF_SPEC);
	inet6 = nest(b, AF_INET6);
	attr(b, IFLA_INET6_ADDR_GEN_MODE, &mode, sizeof mode);
	nest_end(b, inet6);
	nest_end(b, spec);
}

static void put_address(struct batch *b, int index, const struct address *a)
{
	struct ifaddrmsg *message;

	if (!a->family)
		return;
	message = start(b, RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, sizeof *message);
	message->ifa_family = a->family;
	message->ifa_prefixlen = a->prefix;
	message->ifa_index = index;
	if (a->family == AF_INET6)
		message->ifa_flags = IFA_F_NODAD;
	attr(b, IFA_LOCAL, a->ip, ip_len(a));
	attr(b, IFA_ADDRESS, a->ip, ip_len(a));
}

static void put_default_route(struct batch *b, int index, const struct address *gateway)
{
	struct rtmsg *message;

	if (!gateway->family)
		return;
	message = start(b, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, sizeof *message);
	message->rtm_family = gateway->family;
	message->rtm_table = RT_TABLE_MAIN;
	message->rtm_protocol = RTPROT_BOOT;
	message->rtm_scope = RT_SCOPE_UNIVERSE;
	message->rtm_type = RTN_UNICAST;
	attr(b, RTA_GATEWAY, gateway->ip, ip_len(gateway));
	attr_u32(b, RTA_OIF, index);
}

// put_veth asks for the pair in one message, the pod's end born in its namespace.
// That end cannot be created up.
static void put_veth(struct batch *b, const struct network *net, const struct pod *pod,
		     int bridge, int netns)
{
	struct ifinfomsg *link =
		start(b, RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, sizeof *link);
	struct rtattr *info, *data, *peer;

	link->ifi_flags = link->ifi_change = IFF_UP;
	attr_str(b, IFLA_IFNAME, pod->host);
	attr(b, IFLA_ADDRESS, pod->host_mac, 6);
	attr_u32(b, IFLA_MTU, net->mtu);
	attr_u32(b, IFLA_MASTER, bridge);
	/* else the kernel waits for a grace period for each end (veth_init_queues()) */
	attr_u32(b, IFLA_NUM_TX_QUEUES, 1);
	info = nest(b, IFLA_LINKINFO);
	attr_str(b, IFLA_INFO_KIND, "veth");
	data = nest(b, IFLA_INFO_DATA);
	peer = nest(b, VETH_INFO_PEER);
	reserve(b, sizeof(struct ifinfomsg));
	attr_str(b, IFLA_IFNAME, pod->ifname);
	attr(b, IFLA_ADDRESS, pod->mac, 6);
	attr_u32(b, IFLA_MTU, net->mtu);
	attr_u32(b, IFLA_NET_NS_FD, netns);
	attr_u32(b, IFLA_NUM_TX_QUEUES, 1);
	nest_end(b, peer);
	nest_end(b, data);
	nest_end(b, info);
}

// --- the operations ---

// pod_add leaves the caller in the pod's namespace: going back is not needed, since
// the host's socket stays where it was opened.
static void pod_add(int host, int netns, const struct network *net, const struct pod *pod)
{
	struct batch links = {0}, inside = {0};
	int sock, index;

	if (setns(netns, CLONE_NEWNET) < 0)
		die("enter the pod's namespace");
	sock = dial();
	put_veth(&links, net, pod, link_index(host, net->bridge), netns);
	submit(host, &links, "create veth pair");

	index = link_index(sock, pod->ifname);
	put_up(&inside, LOOPBACK);
	if (!net->address6.family)
		put_no_link_local(&inside, index);
	put_up(&inside, index);
	put_address(&inside, index, &net->address);
	put_address(&inside, index, &net->address6);
	put_default_route(&inside, index, &net->gateway);
	put_default_route(&inside, index, &net->gateway6);
	submit(sock, &inside, "configure the pod's end");
	close(sock);
}

static void pod_del(int host, const struct pod *pod)
{
	struct batch b = {0};

	start(&b, RTM_DELLINK, 0, sizeof(struct ifinfomsg));
	attr_str(&b, IFLA_IFNAME, pod->host);
	submit(host, &b, "delete veth pair");
}

static void setup(int host, const struct network *net)
{
	static const uint8_t mac[6] = {0x0a, 0x58, 0, 0, 0, 1};
	struct batch create = {0}, configure = {0};
	struct address gateway = net->gateway, gateway6 = net->gateway6;
	struct rtattr *info;
	int index;

	start(&create, RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, sizeof(struct ifinfomsg));
	attr_str(&create, IFLA_IFNAME, net->bridge);
	attr(&create, IFLA_ADDRESS, mac, sizeof mac);
	info = nest(&create, IFLA_LINKINFO);
	attr_str(&create, IFLA_INFO_KIND, "bridge");
	nest_end(&create, info);
	submit(host, &create, "create bridge");

	index = link_index(host, net->bridge);
	gateway.prefix = net->address.prefix;
	gateway6.prefix = net->address6.prefix;
	put_up(&configure, LOOPBACK);
	put_up(&configure, index);
	put_address(&configure, index, &gateway);
	put_address(&configure, index, &gateway6);
	submit(host, &configure, "configure bridge");
}

// --- running them ---

// identify hashes by FNV-1a, 64 bits. The MACs are locally administered unicast.
static void identify(struct pod *pod, const char *id, const char *ifname)
{
	uint64_t hash = 0xcbf29ce484222325;

	for (const char *p = id; *p; p++)
		hash = (hash ^ (uint8_t)*p) * 0x100000001b3;
	for (const char *p = ifname; *p; p++)
		hash = (hash ^ (uint8_t)*p) * 0x100000001b3;
	snprintf(pod->host, sizeof pod->host, "veth%011" PRIx64, hash >> 20);
	pod->ifname = ifname;
	pod->host_mac[0] = 0x02;
	pod->mac[0] = 0x06;
	memcpy(pod->host_mac + 1, &hash, 5);
	memcpy(pod->mac + 1, &hash, 5);
}

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// loop obeys lines of standard input, "ADD NETNS" or "DEL NETNS", one pod at a time, and
// answers each with its nanoseconds. The namespace is opened before the measurement, as
// the caller of an in-process attach would hand over an open one.
static void loop(int host, struct network *net)
{
	char line[4096], id[32];
	struct pod pod = {0};
	uint64_t from, took;
	int netns;

	for (int i = 0; fgets(line, sizeof line, stdin); i++) {
		line[strcspn(line, "\n")] = '\0';
		if (!strncmp(line, "DEL ", 4)) {
			from = now();
			pod_del(host, &pod);
			took = now() - from;
		} else {
			netns = open(line + strlen("ADD "), O_RDONLY | O_CLOEXEC);
			if (netns < 0)
				die("open namespace %s", line);
			snprintf(id, sizeof id, "loop-%d-%d", (int)getpid(), i);
			identify(&pod, id, "eth0");
			from = now();
			pod_add(host, netns, net, &pod);
			took = now() - from;
			close(netns);
		}
		printf("%" PRIu64 "\n", took);
		fflush(stdout);
	}
}

static struct address parse(const char *text, int family)
{
	struct address a = {.family = family};
	char ip[INET6_ADDRSTRLEN + 1] = "";
	unsigned prefix = family == AF_INET6 ? 128 : 32;

	if (sscanf(text, "%46[^/]/%u", ip, &prefix) < 1 || prefix > 128 ||
	    inet_pton(family, ip, a.ip) != 1) {
		errno = EINVAL;
		die("parse address \"%s\"", text);
	}
	a.prefix = prefix;
	return a;
}

static const char *require(const char *variable)
{
	const char *value = getenv(variable);

	if (!value || !*value) {
		errno = EINVAL;
		die("%s is not set", variable);
	}
	return value;
}

// plugin prints no result: nobody needs one who chose the address himself.
static void plugin(int host, const struct network *net)
{
	const char *command = require("CNI_COMMAND");
	struct pod pod = {0};
	int netns;

	identify(&pod, require("CNI_CONTAINERID"), require("CNI_IFNAME"));
	if (!strcmp(command, "DEL")) {
		pod_del(host, &pod);
	} else if (!strcmp(command, "ADD")) {
		netns = open(require("CNI_NETNS"), O_RDONLY | O_CLOEXEC);
		if (netns < 0)
			die("open namespace %s", require("CNI_NETNS"));
		pod_add(host, netns, net, &pod);
	} else {
		errno = EINVAL;
		die("CNI_COMMAND %s", command);
	}
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"bridge", required_argument, NULL, 'b'},
		{"mtu", required_argument, NULL, 'm'},
		{"address", required_argument, NULL, 'a'},
		{"gateway", required_argument, NULL, 'g'},
		{"address6", required_argument, NULL, 'A'},
		{"gateway6", required_argument, NULL, 'G'},
		{"setup", no_argument, NULL, 's'},
		{"loop", no_argument, NULL, 'l'},
		{0},
	};
	struct network net = {.bridge = "floor0", .mtu = 1500};
	bool make_bridge = false, in_process = false;
	int c, host;

	while ((c = getopt_long_only(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case 'b': net.bridge = optarg; break;
		case 'm': net.mtu = strtoul(optarg, NULL, 10); break;
		case 'a': net.address = parse(optarg, AF_INET); break;
		case 'g': net.gateway = parse(optarg, AF_INET); break;
		case 'A': net.address6 = parse(optarg, AF_INET6); break;
		case 'G': net.gateway6 = parse(optarg, AF_INET6); break;
		case 's': make_bridge = true; break;
		case 'l': in_process = true; break;
		default: return 2;
		}
	}
	host = dial();
	if (make_bridge)
		setup(host, &net);
	else if (in_process)
		loop(host, &net);
	else
		plugin(host, &net);
	return 0;
}
