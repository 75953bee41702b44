package network

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
)

// comparable values of netip are compared as such.
func netipValues() cmp.Option { return cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}) }

// addresses are pods' addresses without gateways.
func addresses(prefixes ...string) []ipam.Address {
	var list []ipam.Address
	for _, p := range prefixes {
		list = append(list, ipam.Address{Prefix: netip.MustParsePrefix(p)})
	}
	return list
}

func TestAddressesComeIPv4First(t *testing.T) {
	t.Parallel()
	given := []ipam.Address{
		{Prefix: netip.MustParsePrefix("fd61::2/64"), Gateway: netip.MustParseAddr("fd61::1")},
		{Prefix: netip.MustParsePrefix("10.61.0.2/24"), Gateway: netip.MustParseAddr("10.61.0.1")},
		{Prefix: netip.MustParsePrefix("fd62::2/64")},
		{Prefix: netip.MustParsePrefix("10.62.0.2/24")},
	}
	want := addresses("10.61.0.2/24", "10.62.0.2/24", "fd61::2/64", "fd62::2/64")
	want[0].Gateway, want[2].Gateway = netip.MustParseAddr("10.61.0.1"), netip.MustParseAddr("fd61::1")
	got, err := newAssignment(given, nil)
	if diff := cmp.Diff(want, got.addresses, netipValues()); diff != "" || err != nil {
		t.Errorf("%v, addresses (-want +got):\n%s", err, diff)
	}
}

// The short name of an attachment is the same wherever it stands.
func TestHashesAgree(t *testing.T) {
	t.Parallel()
	key := Key{Network: "pods", ContainerID: "c1", IfName: "eth0"}
	rec := &state.Attachment{Network: "pods", ContainerID: "c1", IfName: "eth0"}
	if rec.Hash() != key.hash() || bridge.HostName("pods", "c1", "eth0") != "veth"+key.hash() {
		t.Errorf("record %s, key %s, port %s", rec.Hash(), key.hash(), bridge.HostName("pods", "c1", "eth0"))
	}
}

func TestUndoGoesBackThroughAllSteps(t *testing.T) {
	t.Parallel()
	var order []int
	var u undoSteps
	boom := errors.New("boom")
	for i := range 3 {
		u.push(func(ctx context.Context) error {
			order = append(order, i)
			if _, limited := ctx.Deadline(); !limited {
				t.Error("a step back has no time limit")
			}
			if i == 1 {
				return boom
			}
			return nil
		})
	}
	cause := context.DeadlineExceeded // which must not keep anything from being undone
	err := u.run(cause)
	expect.NoDiff(t, cmp.Diff([]int{2, 1, 0}, order), "order")
	if !errors.Is(err, cause) || !errors.Is(err, boom) {
		t.Errorf("error is %v", err)
	}
}

// A hash that is not what the names give shows whether any of these computes it once more.
func TestHashOfAKeyIsPassedOnAndNotComputedAgain(t *testing.T) {
	t.Parallel()
	const hash = "0123456789a"
	own := ipam.Owner{ContainerID: "c1", IfName: "eth0"}
	rec := (&Pod{ContainerID: "c1", IfName: "eth0"}).record(&Network{Name: "pods", Bridge: "cbr0"}, hash)
	dir, err := state.Open(t.TempDir())
	must.Succeed(t, err)
	pending, err := dir.Create(rec)
	must.Succeed(t, err)
	defer pending.Close()
	expect.Is(t, expect.Err(dir.LockAttachment("pods", hash)), state.ErrBusy, "the record is not the hash's")
	target, node := shaperTarget(rec), (&session{}).ipamNode("pods", own, hash)
	for what, text := range map[string]string{
		"port": rec.HostIf, "owner": string(endpoint.Of(rec).Owner), "alias": endpoint.AliasOf(rec),
		"owner of the ifb": target.Owner, "alias of the ifb": target.Alias, "allocator": node.Hash(own),
	} {
		if !strings.Contains(text, hash) {
			t.Errorf("%s %q is not of hash %s", what, text, hash)
		}
	}
	if got := node.Hash(ipam.Owner{ContainerID: "c2", IfName: "eth0"}); got == hash {
		t.Error("another container has the same hash")
	}
}

func TestAPodThatLeasesNeedsNoMACOfItsOwn(t *testing.T) {
	t.Parallel()
	prepare := func(pod *Pod) (*addCall, error) {
		pod.Lease = &Lease{KeeperOptional: true}
		a := &addCall{entry: entry{node: &Node{cfg: settings{Config: Config{LeaseDir: t.TempDir()}}}}, nw: &Network{Name: "lan"}, pod: pod, rec: &state.Attachment{}}
		_, err := a.prepareLease()
		return a, err
	}
	asked := &Pod{ContainerID: "c1", IfName: "eth0"}
	a, err := prepare(asked)
	if err != nil || len(a.pod.MAC) != 6 || a.rec.MAC.String() != a.pod.MAC.String() || asked.MAC != nil {
		t.Errorf("it has %s, %s on record, and was given %s: %v", a.pod.MAC, a.rec.MAC, asked.MAC, err)
	}
	expect.Is(t, expect.Err(prepare(&Pod{ContainerID: "c1", IfName: "eth0", MAC: make(net.HardwareAddr, 8)})), ErrInvalid, "a MAC of 8 bytes")
}

func TestPathsAndNICsThatCannotBeMeantAreRefused(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"run/tombolo", "..", "/run/\x00"} {
		expect.Is(t, expect.Err(Open(t.Context(), &Config{StateDir: path})), ErrInvalid, "a state directory %q", path)
	}
	n, err := Open(t.Context(), &Config{StateDir: t.TempDir()})
	must.Succeed(t, err)
	for _, nic := range []string{"", "..", "a/b", "eth0\x00", "sixteen-bytes-it"} {
		_, _, _, planErr := n.Uplinks().PlanTake(t.Context(), nic, "br0")
		takeErr := n.Uplinks().Take(t.Context(), nic, "br0")
		errs := map[string]error{"Plan": planErr, "Take": takeErr, "Restore": n.Uplinks().Restore(t.Context(), nic, "")}
		if nic != "" {
			errs["Ready"] = n.Ready(t.Context(), &Network{Name: "lan", Bridge: "br0", Uplink: nic}, nil)
		}
		for what, err := range errs {
			expect.Is(t, err, ErrInvalid, "%s of %q", what, nic)
		}
	}
}

// An Attachment that a program makes itself is on no record.
func TestReportOfWhatIsOnNoRecordHasItsDifferences(t *testing.T) {
	t.Parallel()
	in := &Inspection{Attachments: []Report{{}, {Attachment: &Attachment{}}, {Attachment: &Attachment{}, Differences: []tombolo.Difference{{Text: "lost"}}, Inside: []tombolo.Difference{{Text: "gone"}}}}}
	got, err := json.Marshal(in)
	if want := `{"attachments":[{},{},{"differences":[{"text":"lost"}],"inside":[{"text":"gone"}]}]}`; err != nil || string(got) != want {
		t.Errorf("%s, %v; want %s", got, err, want)
	}
}

func TestWhatTheHostSideOfARecordIs(t *testing.T) {
	t.Parallel()
	rec := &state.Attachment{
		Network: "pods", ContainerID: "c1", IfName: "eth0", HostIf: "veth1", Bridge: "cbr0", MTU: 1400, Up: true, Masquerade: true,
		MAC: state.MAC{2, 0, 0, 0, 0, 1}, HostMAC: state.MAC{2, 0, 0, 0, 0, 2},
		Addresses: []ipam.Address{{Prefix: nstest.Prefix("10.61.0.2/24")}, {Prefix: nstest.Prefix("fd61::2/64")}}, Hairpin: true,
	}
	p := portOf(rec)
	if p.Alias != endpoint.AliasOf(rec) || p.MAC.String() != rec.HostMAC.String() || p.PeerMAC.String() != rec.MAC.String() ||
		!p.Hairpin || p.Isolated || p.Down || p.MTU != 1400 || p.Name != "veth1" || p.Peer != "eth0" || p.Bridge != "cbr0" {
		t.Errorf("port is %+v", p)
	}
	ep := endpoint.Of(rec)
	if string(ep.Owner) != rec.Hash() || ep.Network != "pods" || ep.Bridge != "cbr0" || ep.MAC.String() != rec.MAC.String() || !ep.Masquerade {
		t.Errorf("endpoint is %+v", ep)
	}
	if diff := cmp.Diff([]netip.Addr{nstest.Addr("10.61.0.2"), nstest.Addr("fd61::2")}, ep.Addrs, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		t.Errorf("endpoint's addresses (-want +got):\n%s", diff)
	}
	// A record without MACs, as one that never came to its end: nothing is made up.
	if p := portOf(&state.Attachment{}); p.MAC != nil || p.PeerMAC != nil || !p.Down {
		t.Errorf("port of an empty record is %+v", p)
	}
}
