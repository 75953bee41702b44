#!/usr/bin/env python3
"""Checks the cluster that is up, and prints how many checks of each group passed, as the rows of a table.

usage: check.py LABEL [GROUP...]   functions below; without any, those of NETWORK
"""
import glob, json, os, re, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
DIR = os.environ.get("CLUSTER_DIR") or os.path.join(HERE, "../../.cache/cluster")
SETTINGS = dict(line.strip().split("=") for line in open(DIR + "/run/settings"))  # of the cluster that is up
FAMILIES = [int(f) for f in SETTINGS["FAMILIES"]]
FAMILY, LAN = FAMILIES[0], SETTINGS["MODE"] != "gateway"
OUTSIDE = {4: "192.0.2.100", 6: "2001:db8:1::100"}
NODES = {f"n{i}": {f: {4: f"192.0.2.1{i}", 6: f"2001:db8:1::1{i}"}[f] for f in FAMILIES} for i in (1, 2, 3)}
EXTERNAL = {4: "192.0.2.200", 6: "2001:db8:1::200"}[FAMILY]
AGNHOST = {"name": "c", "image": "registry.k8s.io/e2e-test-images/agnhost:2.56", "args": ["netexec", "--udp-port=8081"],
           "readinessProbe": {"httpGet": {"path": "/hostname", "port": 8080}, "periodSeconds": 1}}
BRIDGE, NAME = ("br0", "lan") if LAN else ("cbr0", "pods")
BEGAN = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 1))
results = []  # of the group at work: whether each passed

def run(*command, **more):
    """The command's standard output; if it fails, "exit" with all that it says."""
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, **more)
    return (done.stdout if done.returncode == 0 else f"exit {done.returncode}: {done.stdout}{done.stderr}").strip()

def at(*prefix):
    return lambda *command, **more: run(*prefix, *command, **more)
def on(node):
    return at("nsenter", "-t", open(f"{DIR}/run/{node}.pid").read().strip(), "-a")

kubectl = at("ip", "netns", "exec", "tcluster-control", DIR + "/bin/kubectl", "--kubeconfig", DIR + "/run/admin.conf")
outside = at("ip", "netns", "exec", "tcluster-outside")
cluster = at(HERE + "/cluster.sh")

def kubectl_json(*arguments):
    return json.loads(kubectl("get", *arguments, "-o", "json"))
def by_family(addresses):
    return {6 if ":" in a else 4: a for a in addresses}

class Pod:
    def __init__(self, pod):
        self.name, self.node = pod["metadata"]["name"], pod["spec"]["nodeName"]
        self.ip = by_family(a["ip"] for a in pod["status"]["podIPs"])
        container = pod["status"]["containerStatuses"][0]["containerID"].split("//")[1]
        pids = re.search(".*/pids/.*", open(DIR + "/run/groups").read())[0]
        group = f"{pids}/{self.node}/kubepods/**/{container}/cgroup.procs"
        self.pid = open(glob.glob(group, recursive=True)[0]).read().split()[0]
        self.run = at("nsenter", "-t", self.pid, "-n")           # this machine's programs, in the pod's network
        self.inside = at("nsenter", "-t", self.pid, "-n", "-m")  # those of its image

def pods(app):
    items = kubectl_json("-n", "t", "pods", "-l", "app=" + app)["items"]
    return sorted((Pod(p) for p in items if "deletionTimestamp" not in p["metadata"]), key=lambda p: p.node)

def cluster_ip(service):
    return by_family(kubectl_json("-n", "t", "service", service)["spec"]["clusterIPs"])

def get(where, address, port, path="hostname", seconds=5, scheme="http"):
    host = f"[{address}]" if ":" in address else address
    return where("curl", "-gsSk", "-m", str(seconds), f"{scheme}://{host}:{port}/{path}")
def source(where, address, port):
    """Whose address the server sees."""
    return get(where, address, port, "clientip").rsplit(":", 1)[0].strip("[]").replace("::ffff:", "")
def udp(where, address, port):
    ask = f"exec 3<>/dev/udp/{address}/{port}; echo hostname >&3; dd bs=200 count=1 <&3 2>/dev/null"
    return where("timeout", "3", "bash", "-c", ask)

def holds(name, true, why=""):
    results.append(bool(true))
    if not true:
        print(f"FAIL {name}: {why[:600]}", flush=True)
def equal(name, got, want):
    holds(name, got == want, f"got {got!r}, want {want!r}")

def soon(name, wrong, seconds=60):
    """Waits until nothing is wrong."""
    end = time.monotonic() + seconds
    while (told := wrong()) and time.monotonic() < end:
        time.sleep(0.5)
    holds(name, not told, str(told))
def soon_equal(name, look, want):
    soon(name, lambda: None if (got := look()) == want else f"got {got!r}, want {want!r}")

def workload(kind, name, container, pod={}, spec={}, annotations={}):
    template = {"metadata": {"labels": {"app": name}, "annotations": annotations},
                "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]} | pod}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": "t"},
            "spec": {"selector": {"matchLabels": {"app": name}}, "template": template} | spec}

def service(name, app, node_port=None, **spec):
    ports = [{"name": protocol.lower(), "protocol": protocol, "port": 80 + i, "targetPort": 8080 + i,
              "nodePort": node_port and node_port + i} for i, protocol in enumerate(("TCP", "UDP"))]
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "t"},
            "spec": {"ipFamilyPolicy": "PreferDualStack", "selector": {"app": app}, "ports": ports} | spec}

def apply():
    ports = [{"containerPort": 8080, "hostPort": 8088}, {"containerPort": 8081, "hostPort": 8089, "protocol": "UDP"},
             {"containerPort": 8080, "hostPort": 8090, "hostIP": NODES["n2"][FAMILY]}]
    limits = {"kubernetes.io/ingress-bandwidth": "20M", "kubernetes.io/egress-bandwidth": "10M"}
    items = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "t"}},
        workload("Deployment", "web", AGNHOST, spec={"replicas": 6}),
        workload("Deployment", "solo", AGNHOST, {"nodeName": "n1"}),
        workload("Deployment", "many", {"name": "c", "image": "registry.k8s.io/pause:3.10.1"}, spec={"replicas": 0}),
        workload("DaemonSet", "client", AGNHOST),
        workload("DaemonSet", "published", AGNHOST | {"ports": ports}, {"nodeSelector": {"kubernetes.io/hostname": "n2"}}),
        workload("Deployment", "limited", AGNHOST, {"nodeName": "n3"}, annotations=limits),
        service("web", "web"), service("solo", "solo"), service("head", "web", clusterIP="None"),
        service("sticky", "web", sessionAffinity="ClientIP"), service("local", "client", internalTrafficPolicy="Local"),
        service("ports", "solo", 30080, type="NodePort"), service("external", "web", externalIPs=[EXTERNAL]),
        service("ports-local", "solo", 30090, type="NodePort", externalTrafficPolicy="Local")]
    kubectl("apply", "-f", "-", input="\n---\n".join(map(json.dumps, items)))
    rolled_out()

def rolled_out():
    told = kubectl("-n", "t", "rollout", "status", "deployment,daemonset", "--timeout=240s")
    holds("all is rolled out", not told.startswith("exit"), told)

def pods_and_nodes():
    for a in (clients := pods("client")):
        for b in clients:
            for f in FAMILIES:
                equal(f"pod {a.node} to pod {b.node}, IPv{f}: source", source(a.run, b.ip[f], 8080), a.ip[f])
                equal(f"node {a.node} to pod {b.node}, IPv{f}", get(on(a.node), b.ip[f], 8080), b.name)
                equal(f"pod {a.node} to node {b.node}, IPv{f}", get(a.run, NODES[b.node][f], 10250, "healthz", scheme="https"), "ok")

def services():
    solo, solo_ip, web_ip, webs = pods("solo")[0], cluster_ip("solo"), cluster_ip("web"), {p.name for p in pods("web")}
    for a in pods("client"):
        for f in FAMILIES:
            seen = {get(a.run, web_ip[f], 80) for _ in range(30)}
            holds(f"30 requests from {a.node}, IPv{f}", seen <= webs and len(seen) > 1, str(seen))
            holds(f"UDP from {a.node}, IPv{f}", (got := udp(a.run, web_ip[f], 81)) in webs, got)
            equal(f"source of {a.node}, IPv{f}", source(a.run, solo_ip[f], 80), a.ip[f])
            equal(f"node {a.node}, IPv{f}", get(on(a.node), solo_ip[f], 80), solo.name)
        equal(f"internalTrafficPolicy Local, {a.node}", get(a.run, cluster_ip("local")[FAMILY], 80), a.name)
    equal("session affinity", len({get(a.run, cluster_ip("sticky")[FAMILY], 80) for _ in range(8)}), 1)
    outside("ip", "route", "replace", EXTERNAL, "via", NODES["n2"][FAMILY])
    holds("external IP", (got := get(outside, EXTERNAL, 80)) in webs, got)

def hairpin():
    solo, ip = pods("solo")[0], cluster_ip("solo")
    for f in FAMILIES:
        equal(f"TCP, IPv{f}", get(solo.run, ip[f], 80), solo.name)
        equal(f"UDP, IPv{f}", udp(solo.run, ip[f], 81), solo.name)
        for port in (30080, 30090):
            equal(f"by node port {port}, IPv{f}", get(solo.run, NODES["n1"][f], port), solo.name)

def node_ports():
    solo, client = pods("solo")[0], pods("client")[1]
    for n, ips in NODES.items():
        for f, ip in ips.items():
            equal(f"outside to {n}, Cluster, IPv{f}", get(outside, ip, 30080), solo.name)
            equal(f"outside to {n}, Cluster, UDP, IPv{f}", udp(outside, ip, 30081), solo.name)
            equal(f"pod to {n}, IPv{f}", get(client.run, ip, 30080), solo.name)
            equal(f"{n} to itself, IPv{f}", get(on(n), ip, 30080), solo.name)
            if n == solo.node:
                equal(f"outside to {n}, Local: source, IPv{f}", source(outside, ip, 30090), OUTSIDE[f])
                equal(f"outside to {n}, Local, UDP, IPv{f}", udp(outside, ip, 30091), solo.name)
            else:
                holds(f"outside to {n}, Local, no endpoint, IPv{f}", get(outside, ip, 30090, seconds=1).startswith("exit"))

def host_ports():
    p = pods("published")[0]
    for f, ip in NODES["n2"].items():
        equal(f"outside: source, IPv{f}", source(outside, ip, 8088), OUTSIDE[f])
        equal(f"outside, UDP, IPv{f}", udp(outside, ip, 8089), p.name)
        for a in pods("client"):
            equal(f"node {a.node}, IPv{f}", get(on(a.node), ip, 8088), p.name)
            equal(f"pod {a.node}, IPv{f}", get(a.run, ip, 8088), p.name)
        equal(f"the pod itself, IPv{f}", get(p.run, ip, 8088), p.name)
    if 4 in FAMILIES and not LAN:
        equal("127.0.0.1", get(on("n2"), "127.0.0.1", 8088), p.name)
    equal("hostIP", get(outside, NODES["n2"][FAMILY], 8090), p.name)
    holds("not at 127.0.0.1 with a hostIP", get(on("n2"), "127.0.0.1", 8090).startswith("exit"))

def dns():
    zone, kinds = "t.svc.cluster.local", {4: "A", 6: "AAAA"}
    for a in pods("client"):
        for f in FAMILIES:
            for more in ([], ["+tcp"]):
                equal(f"{kinds[f]} {more} from {a.node}", a.inside("dig", "+short", *more, "solo." + zone, kinds[f]), cluster_ip("solo")[f])
        asked = [word for f in FAMILIES for word in ("head." + zone, kinds[f])]
        equal(f"headless from {a.node}", len(a.inside("dig", "+short", *asked).split()), 6 * len(FAMILIES))
        got = get(a.inside, "kubernetes.default.svc.cluster.local", 443, "version", scheme="https")
        holds(f"API server from {a.node}", "gitVersion" in got, got)

def masquerade():
    for a in pods("client"):
        for f in FAMILIES:
            equal(f"pod {a.node} outside, IPv{f}", source(a.run, OUTSIDE[f], 9999), a.ip[f] if LAN else NODES[a.node][f])

def bandwidth():
    """The receiver measures, in the last of five seconds."""
    limited, client = pods("limited")[0], pods("client")[0]
    for name, sender, receiver, mbit in (("to the pod", client, limited, 20), ("from the pod", limited, client, 10)):
        server = subprocess.Popen(["nsenter", "-t", sender.pid, "-n", "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        told = receiver.run("iperf3", "-c", sender.ip[FAMILY], "-R", "-t", "5", "-J")
        server.kill()
        got = json.loads(told)["intervals"][-1]["sum"]["bits_per_second"] / 1e6
        holds(f"{name}: {mbit} Mbit/s", 0.8 * mbit < got < 1.1 * mbit, f"{got:.1f}")

def keeper(node, verb, *arguments):
    """kubectl VERB of the pod that the DaemonSet has on the node."""
    name = kubectl("-n", "kube-system", "get", "pods", "-l", "app=tombolo", "--field-selector", "spec.nodeName=" + node, "-o", "name")
    return kubectl("-n", "kube-system", verb, name, "-c", "tombolod", *arguments)

def leftovers(node):
    items = kubectl_json("pods", "-A", "--field-selector", "spec.nodeName=" + node)["items"]
    want = sum(not p["spec"].get("hostNetwork") for p in items)
    ports = len(json.loads(on(node)("ip", "-j", "link", "show", "master", BRIDGE, "type", "veth"))) - LAN
    addresses = len([n for n in on(node)("ls", f"/run/tombolo/ipam/{NAME}").split() if n[0] == "1" or ":" in n])
    return None if (want, len(FAMILIES) * want) == (ports, addresses) else f"{want} pods, {ports} ports, {addresses} addresses"

def nothing_left():
    for n in NODES:
        soon(f"as many ports and addresses as pods on {n}", lambda: leftovers(n))
        soon(f"tombolo check on {n}", lambda: (told := keeper(n, "exec", "--", "tombolo", "check")).startswith("exit") and told)
        warnings = [w for w in keeper(n, "logs", "--since-time", BEGAN).splitlines() if "level=INFO" not in w]
        holds(f"log of tombolod on {n}", not warnings, "\n".join(warnings))

def forward_drop():
    (a, b, c), p, n2 = pods("client"), pods("published")[0], on("n2")
    own = [f"{t} -A FORWARD -s {cidr} -o cbr0 -j ACCEPT" for t, cidr in (("iptables", "10.244.0.0/16"), ("ip6tables", "fd24::/48"))]
    for tables in ("iptables", "ip6tables"):
        n2(tables, "-P", "FORWARD", "DROP")
    # Tombolo cannot add rules to legacy tables, but says what helps.
    advice = re.findall("this helps: (ip6?tables-legacy .*)", keeper("n2", "exec", "--", "tombolo", "check"))
    for rule in advice:
        n2(*rule.split())
    for f in FAMILIES:
        soon_equal(f"a pod goes outside, IPv{f}", lambda: source(b.run, OUTSIDE[f], 9999), b.ip[f] if LAN else NODES["n2"][f])
        soon_equal(f"a pod reaches another node's, IPv{f}", lambda: get(b.run, c.ip[f], 8080), c.name)
        soon_equal(f"a host port is reached, IPv{f}", lambda: get(outside, NODES["n2"][f], 8088), p.name)
    for rule in own:  # docs/cluster.md
        n2(*rule.split())
    for f in FAMILIES:
        soon_equal(f"other nodes' pods reach one, IPv{f}", lambda: get(a.run, b.ip[f], 8080), b.name)
    for rule in own + advice:
        n2(*rule.replace("-A", "-D").split())
        n2(rule.split()[0], "-P", "FORWARD", "ACCEPT")
    soon("Tombolo takes its rule back", lambda: "tombolo:" in (told := n2("iptables", "-S", "FORWARD")) and told, 90)

def scale(count, meanwhile=lambda: None):
    kubectl("-n", "t", "scale", "deployment/many", f"--replicas={count}")
    meanwhile()
    rolled_out()

def killed(program):
    a, b, _ = pods("client")
    equal(f"{program} is killed", cluster("kill", "2", program), "")
    equal("pods go on", get(a.run, b.ip[FAMILY], 8080), b.name)
    equal(f"{program} starts", cluster("start", "2", program), "")

def kubelet_killed():
    killed("kubelet")
    kubectl("-n", "t", "delete", "pod", pods("client")[1].name)
    rolled_out()

def containerd_killed():
    """While pods start."""
    scale(20, lambda: time.sleep(2) or killed("containerd"))
    scale(0)

def churn():
    scale(60)
    scale(60, lambda: kubectl("-n", "t", "rollout", "restart", "deployment/many"))
    scale(0)

def absent():
    """What is wrong while the API server tells of containers of before a boot."""
    try:
        return [p.name for app in ("web", "client", "published", "limited") for p in pods(app) if not p.pid]
    except (IndexError, KeyError, OSError) as e:
        return repr(e)

def power_cut(node="n2"):
    a, b = [p for p in pods("client") if p.node != node]
    equal("power off", cluster("cut", node[1]), "")
    equal("the other nodes' pods go on", get(a.run, b.ip[FAMILY], 8080), b.name)
    holds("power on", not (told := cluster("boot", node[1])).startswith("exit"), told)
    soon("all pods run again", absent, 120)
    kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=60s")
    rolled_out()

def status():
    """containerd 2.1 and later ask the plugin whether it could add a pod."""
    ready = lambda: kubectl("get", "node", "n3", "-o", "jsonpath={.status.conditions[?(@.type=='Ready')]}")
    on("n3")("nft", "add table inet breaker; add chain inet breaker f { type filter hook forward priority 300; policy drop; }")
    soon("the node's condition names what drops all", lambda: not re.search('(?s)table inet breaker.*"False"', ready()) and ready())
    on("n3")("nft", "delete table inet breaker")
    soon("the node is ready again", lambda: '"status":"True"' not in ready() and ready())

def two_versions():
    """n3 boots with the other version."""
    on("n3")("ctr", "-n", "k8s.io", "images", "import", DIR + "/images/other/tombolo.tar")
    on("n3")("rm", "-f", "/opt/cni/bin/tombolo")
    power_cut("n3")
    sums = [on(n)("sha256sum", "/opt/cni/bin/tombolo") for n in NODES]
    holds("n3 alone has the other version", sums[0] == sums[1] != sums[2] and "exit" not in str(sums), str(sums))

NETWORK = [pods_and_nodes, services, hairpin, node_ports, host_ports, dns, masquerade, bandwidth, nothing_left, forward_drop]

def main(label, *names):
    failed = 0
    for group in [apply, *([globals()[name] for name in names] or NETWORK)]:
        results.clear()
        try:
            group()
        except Exception as e:
            holds("it comes to an end", False, repr(e))
        failed += (bad := results.count(False))
        print(f"| {label} | {group.__name__} | {len(results) - bad} passed, {bad} failed |", flush=True)
    sys.exit(failed > 0)

if __name__ == "__main__":
    main(*sys.argv[1:])
