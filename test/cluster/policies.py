#!/usr/bin/env python3
"""Checks NetworkPolicies in the cluster that is up, whose nodes run an engine (cluster.sh start N policies).

usage: policies.py LABEL [CASE...]   keys of CASES; without any, all

Each case applies its policies, and lets all pods, two nodes and the client outside call everything that there is. admits()
derives from the policies who may: it knows nothing of the engine.
"""
import ipaddress, itertools, json, socket, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from check import *

PLACES = {"a": "n1", "b": "n1", "c": "n2"}  # of the pods in each namespace
PORTS = {"web": 80, "admin": 81}            # each by TCP and UDP; namespace x names them

def label(key, value):
    return {"matchLabels": {key: value}}
def namespace(name):
    return {"namespaceSelector": label("kubernetes.io/metadata.name", name)}
def pod(name):
    return {"podSelector": label("pod", name)}
def blocks(addresses, *but):
    """Peers of both families; but lists who is excepted."""
    return [{"ipBlock": {"cidr": str(addresses[f]), "except": [f"{b[f]}/{32 if f == 4 else 128}" for b in but]}} for f in FAMILIES]
def policy(where, name, pods={}, **rules):
    """where is its namespace. ingress and egress are lists of rules; [] admits nothing."""
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name, "namespace": where},
            "spec": {"podSelector": pods, "policyTypes": [kind.title() for kind in rules], **rules}}

def cases():
    a, all_pods = label("pod", "a"), {4: "192.0.2.128/25" if LAN else "10.244.0.0/16", 6: "2001:db8:1::1:0:0/96" if LAN else "fd24::/48"}
    dns = {"to": [namespace("kube-system") | {"podSelector": label("k8s-app", "kube-dns")}],
           "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53}]}
    only_outside = blocks({f: f"{OUTSIDE[f]}/{32 if f == 4 else 128}" for f in FAMILIES})
    return {
        "no policy": [],
        "default deny of ingress": [policy("x", "p", ingress=[])],
        "default deny of egress": [policy("x", "p", egress=[])],
        "default deny of both": [policy("x", "p", ingress=[], egress=[])],
        "from a namespace": [policy("x", "p", a, ingress=[{"from": [namespace("y")]}])],
        "from a pod": [policy("x", "p", a, ingress=[{"from": [pod("b")]}])],
        "from a namespace's pod": [policy("x", "p", a, ingress=[{"from": [namespace("y") | pod("b"), namespace("z") | pod("c")]}])],
        "from a namespace or a pod": [policy("x", "p", a, ingress=[{"from": [namespace("y"), pod("b")]}])],
        "egress and DNS": [policy("x", "p", a, egress=[{"to": [namespace("y")]}, dns])],
        "block with exceptions, ingress": [policy("x", "p", a, ingress=[{"from": blocks(all_pods, WHO["z/b"].ip)}])],
        "block with exceptions, egress": [policy("x", "p", a, egress=[{"to": blocks(all_pods, WHO["x/b"].ip, WHO["y/c"].ip)}])],
        "block outside": [policy("x", "p", label("pod", "b"), ingress=[{"from": only_outside}], egress=[{"to": only_outside}])],
        "named ports": [policy("x", "p", a, ingress=[{"from": [namespace("y"), pod("b")], "ports": [{"port": "admin"}]}]),
                        policy("y", "p", a, egress=[{"ports": [{"port": "web"}]}])],
        "ranges and protocols": [policy("x", "p", a, ingress=[{"ports": [{"port": 81, "endPort": 90}, {"port": 70, "endPort": 79}]}]),
                                 policy("x", "q", label("pod", "c"), ingress=[{"ports": [{"port": 80, "protocol": "UDP"}]}])],
        "stacked": [policy("x", "p", ingress=[], egress=[]), policy("x", "q", a, egress=[{"to": [namespace("y") | pod("a")]}]),
                    policy("x", "r", label("pod", "c"), ingress=[{"from": [namespace("y")]}]),
                    policy("x", "s", label("pod", "c"), ingress=[{"from": [pod("b")], "ports": [{"port": 81}]}]),
                    policy("y", "p", a, ingress=[{"from": [namespace("x") | pod("a")], "ports": [{"port": 80}]}])],
    }

class Place:
    """Somebody who calls or is called: a pod's namespace and labels are set."""
    def __init__(self, ip, node="", run=None, namespace="", labels={}, services={}):
        self.ip, self.node, self.run, self.namespace, self.labels, self.services = ip, node, run, namespace, labels, services

def admits(policies, kind, caller, callee, family, port, protocol):
    """Whether the policies of the caller (egress) or of the callee (ingress) admit a connection."""
    at, other = (caller, callee) if kind == "egress" else (callee, caller)
    def selects(selector, labels):
        return selector.get("matchLabels", {}).items() <= labels.items()
    def is_peer(peer):
        if "ipBlock" in peer:
            address, block = ipaddress.ip_address(other.ip[family]), peer["ipBlock"]
            within, *excepted = [address in ipaddress.ip_network(net) for net in [block["cidr"], *block["except"]]]
            return within and not any(excepted)
        name = {"kubernetes.io/metadata.name": other.namespace}
        there = selects(peer["namespaceSelector"], name) if "namespaceSelector" in peer else other.namespace == at.namespace
        return bool(other.namespace) and there and selects(peer.get("podSelector", {}), other.labels)
    def is_port(wanted):
        first = wanted["port"]
        if isinstance(first, str):
            first = PORTS[first] if "pod" in callee.labels else -1
        return wanted.get("protocol", "TCP").lower() == protocol and first <= port <= wanted.get("endPort", first)
    mine = [p["spec"] for p in policies if at.namespace == p["metadata"]["namespace"] and
            kind.title() in p["spec"]["policyTypes"] and selects(p["spec"]["podSelector"], at.labels)]
    return not mine or any(any(map(is_peer, rule.get("from") or rule.get("to") or [])) or not rule.keys() & {"from", "to"}
                           for spec in mine for rule in spec[kind]
                           if "ports" not in rule or any(map(is_port, rule["ports"])))

def set_up():
    items = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ns}} for ns in "xyz"]
    for i, (ns, name) in enumerate(itertools.product("xyz", PLACES)):
        containers = [{"name": port, "image": AGNHOST["image"], "args": ["netexec", f"--http-port={number}", f"--udp-port={number}"],
                       "ports": [{"name": port, "containerPort": number} | ({"hostPort": 7000 + i} if port == "web" else {})]}
                      for port, number in PORTS.items()]
        meta = {"name": name, "namespace": ns, "labels": {"pod": name}}
        items += [{"apiVersion": "v1", "kind": "Pod", "metadata": meta,
                   "spec": {"nodeName": PLACES[name], "terminationGracePeriodSeconds": 0, "containers": containers}},
                  {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": ns},
                   "spec": {"type": "NodePort", "externalTrafficPolicy": "Local", "ipFamilyPolicy": "PreferDualStack", "selector": {"pod": name},
                            "ports": [{"name": f"{protocol.lower()}{port}", "protocol": protocol, "port": port,
                                       "nodePort": 31000 + 10 * i + 2 * (port - 80) + (protocol == "UDP")}
                                      for port in PORTS.values() for protocol in ("TCP", "UDP")]}}]
    for node in ("n1", "n2"):
        items.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "host-" + node, "namespace": "z"},
                      "spec": {"nodeName": node, "hostNetwork": True, "terminationGracePeriodSeconds": 0,
                               "containers": [AGNHOST | {"args": ["netexec", "--http-port=8080"]}]}})
    for part in (items[:3], items[3:]):
        until = time.monotonic() + 30
        while (told := kubectl("apply", "-f", "-", input="\n---\n".join(map(json.dumps, part)))).startswith("exit") and time.monotonic() < until:
            time.sleep(1)  # a namespace's account comes later than the namespace
    for ns in "xyz":
        holds("pods of " + ns, not (told := kubectl("-n", ns, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=120s")).startswith("exit"), told)

def look():
    """WHO is the places by their names."""
    for ns in "xyz":
        services = {s["metadata"]["name"]: by_family(s["spec"]["clusterIPs"]) for s in kubectl_json("-n", ns, "services")["items"]}
        for item in kubectl_json("-n", ns, "pods")["items"]:
            if item["metadata"]["name"] in PLACES:
                p = Pod(item)
                WHO[f"{ns}/{p.name}"] = Place(p.ip, p.node, p.run, ns, item["metadata"]["labels"], services[p.name])
    for node in ("n1", "n2"):
        WHO[node] = Place(NODES[node], node, on(node))
    WHO["outside"] = Place(OUTSIDE, run=outside)
    name = kubectl_json("-n", "kube-system", "pods", "-l", "k8s-app=kube-dns")["items"][0]
    services = by_family(kubectl_json("-n", "kube-system", "service", "kube-dns")["spec"]["clusterIPs"])
    WHO["dns"] = Place(Pod(name).ip, namespace="kube-system", labels=name["metadata"]["labels"], services=services)

def targets(caller):
    """All that a place calls: what, the callee, the family, the protocol, the callee's port, and the address and port to call."""
    me = WHO[caller]
    for f, (i, (name, it)) in itertools.product(FAMILIES, enumerate(WHO.items())):
        if name == "dns" and me.namespace:
            yield from (("DNS", it, f, protocol, 53, it.services[f], 53) for protocol in ("tcp", "udp"))
        elif name == "outside" and me.namespace:
            yield name, it, f, "tcp", 9999, it.ip[f], 9999
        elif name in NODES and me.namespace and me.node != it.node:
            yield "host network of " + name, it, f, "tcp", 8080, it.ip[f], 8080
        elif it.node and it.namespace and name != caller:
            for port, protocol in itertools.product(PORTS.values(), ("tcp", "udp")):
                yield name, it, f, protocol, port, it.ip[f], port
                if me.namespace:
                    yield "service " + name, it, f, protocol, port, it.services[f], port
            if me.namespace or me.node != it.node:
                yield "node port of " + name, it, f, "tcp", 80, NODES[it.node][f], 31000 + 10 * i
                yield "host port of " + name, it, f, "tcp", 80, NODES[it.node][f], 7000 + i

def probe():
    """Run in a place's network: reads calls from standard input, makes all at once, and writes which were answered."""
    calls = json.load(sys.stdin)
    answered = [False] * len(calls)
    def call(i, family, protocol, address, port, source):
        s = socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6,
                          socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM)
        ask = b"GET /hostname HTTP/1.0\r\n\r\n" if port != 53 else DNS_ASKS[protocol]
        if protocol == "udp":
            # conntrack remembers a flow of the case before, which engines admit: each has a port of its own.
            s.bind(("", source))
            ask = b"hostname\n" if port != 53 else ask
        for _ in range(2 if protocol == "udp" else 1):
            try:
                s.settimeout(2 if protocol == "tcp" else 1)
                s.connect((address, port))
                s.sendall(ask)
                answered[i] = bool(s.recv(500))
                break
            except OSError:
                pass
        s.close()
    threads = [threading.Thread(target=call, args=(i, *c)) for i, c in enumerate(calls)]
    for t in threads: t.start()
    for t in threads: t.join()
    json.dump(answered, sys.stdout)

question = b"\0\7\1\0\0\1\0\0\0\0\0\0\12kubernetes\7default\3svc\7cluster\5local\0\0\1\0\1"
DNS_ASKS = {"udp": question, "tcp": len(question).to_bytes(2, "big") + question}

def check_case(number, policies):
    for ns in "xyz":
        kubectl("-n", ns, "delete", "networkpolicy", "--all")
    if policies:
        kubectl("apply", "-f", "-", input="\n---\n".join(map(json.dumps, policies)))
    time.sleep(3)  # the engine hears of it
    def calls(caller):
        return [(f, protocol, address, port, 20000 + 500 * number + i)
                for i, (_, _, f, protocol, _, address, port) in enumerate(targets(caller))]
    def ask(caller):
        told = WHO[caller].run("python3", __file__, "probe", input=json.dumps(calls(caller)))
        return json.loads(told) if told.startswith("[") else [told] * len(calls(caller))
    callers = [name for name, place in WHO.items() if place.run]
    with ThreadPoolExecutor(4) as pool:
        for caller, answered in zip(callers, pool.map(ask, callers)):
            me = WHO[caller]
            for (name, it, f, protocol, port, address, called), got in zip(targets(caller), answered):
                # On its own node a connection goes to the pod itself, on another one to that node's port.
                first, at = (WHO[it.node], called) if address == NODES.get(it.node, {}).get(f) and it.node != me.node else (it, port)
                want = not me.namespace and me.node == it.node or (  # a node always reaches its pods
                    admits(policies, "egress", me, first, f, at, protocol) and admits(policies, "ingress", me, it, f, port, protocol))
                equal(f"{caller} calls {name} at {protocol} {port}, IPv{f}: answered", got, want)

WHO = {}

if __name__ == "__main__":
    if sys.argv[1:] == ["probe"]:
        sys.exit(probe())
    set_up()
    look()
    wrong = results.count(False)
    for number, (name, policies) in enumerate(cases().items()):
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        results.clear()
        check_case(number, policies)
        wrong += (bad := results.count(False))
        print(f"| {sys.argv[1]} | {name} | {len(results) - bad} passed, {bad} failed |", flush=True)
    for ns in "xyz":
        kubectl("-n", ns, "delete", "networkpolicy", "--all")
    sys.exit(wrong > 0)
