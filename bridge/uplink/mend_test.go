package uplink_test

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// What network managers and operators do to a NIC that was taken over.
func TestWhatOthersDoIsFoundAndMended(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		do     []string
		find   string // in what Check finds
		keep   bool
		differ bool // the state is another afterwards, and that is right
	}{
		{name: "an address is put back on the NIC", do: []string{"addr add 10.0.0.5/24 dev eth0", "route replace default via 10.0.0.1 dev eth0"}, find: "link eth0: address 10.0.0.5/24 does not belong there"},
		{name: "a new address is given to the NIC", do: []string{"addr add 10.0.0.55/24 dev eth0"}, find: "address 10.0.0.55/24", differ: true},
		{name: "a route by the NIC", do: []string{"route add 172.16.0.0/12 dev eth0"}, find: "link eth0: route 172.16.0.0/12 dev eth0 does not belong there", differ: true},
		{name: "a rule for the NIC", do: []string{"rule add iif eth0 table 9 pref 9"}, find: "rule 9: from all iif eth0", differ: true},
		{name: "an address is taken off the bridge", do: []string{"addr del 10.0.0.5/24 dev br0"}, find: "bridge br0: address 10.0.0.5/24 is missing"},
		{name: "all addresses are taken off the bridge", do: []string{"addr flush dev br0"}, find: "bridge br0: address fd00::5/64 is missing"},
		{name: "the default route is deleted", do: []string{"route del default"}, find: "bridge br0: route default via 10.0.0.1 dev br0 is missing"},
		{name: "the NIC is no port any more", do: []string{"link set eth0 nomaster"}, find: "link eth0: master br0 is missing"},
		{name: "the bridge is down", do: []string{"link set br0 down"}, find: "bridge br0: state is down, should be up"},
		{name: "the bridge is deleted", do: []string{"link del br0"}, find: "bridge br0: link br0 is missing"},
		{name: "the bridge has another MAC", do: []string{"link set br0 address 02:00:00:00:00:42"}, find: "bridge br0: MAC is 02:00:00:00:00:42"},
		{name: "all of it is undone by hand", do: append([]string{"link del br0"}, plainHost()...), find: "link eth0: address 10.0.0.5/24"},
		{name: "with addresses kept, another on the NIC", do: []string{"addr add 10.0.0.55/24 dev eth0"}, keep: true, find: "address 10.0.0.55/24", differ: true},
		{name: "with addresses kept, the bridge is deleted", do: []string{"link del br0"}, keep: true, find: "link br0 is missing"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			before := state(t, l.host)
			u := toBridge()
			u.KeepAddress = tt.keep
			rec, j := take(t, l, u)
			taken := state(t, l.host)
			expect.Of(l.conn.Mend(t.Context(), rec, j)).Is(t, false, "mend what is as it should be")
			run(t, l.host, tt.do...)
			list, _, err := l.conn.Check(t.Context(), rec)
			must.Succeed(t, err)
			var found []string
			for _, d := range list {
				found = append(found, d.String())
			}
			expect.Contains(t, strings.Join(found, "\n"), tt.find, "check finds")
			changed, err := l.conn.Mend(t.Context(), rec, j)
			must.That(t, changed && err == nil, "mend: %t, %v", changed, err)
			l.mustBeTaken(t, "mended", rec)
			l.mustReach(t, "mended")
			diff := cmp.Diff(comparableState(taken), comparableState(state(t, l.host)))
			expect.That(t, diff == "" || tt.differ, "after it was mended (-want +got):\n%s", diff)
			must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
			l.mustReach(t, "given back")
			diff = cmp.Diff(comparableState(before), comparableState(state(t, l.host)))
			expect.That(t, diff == "" || tt.differ, "after it was given back (-want +got):\n%s", diff)
		})
	}
}

func TestWhatCannotBeMendedIsLeft(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	rec, j := take(t, l, toBridge())
	run(t, l.host, "link add other type bridge", "link set eth0 master other")
	if _, err := l.conn.Mend(t.Context(), rec, j); !errors.Is(err, uplink.ErrRefused) || !strings.Contains(err.Error(), "port of other now") {
		t.Errorf("mend a port of another bridge: %v", err)
	}
	run(t, l.host, "link set eth0 nomaster", "link set eth0 down")
	if _, err := l.conn.Mend(t.Context(), rec, j); !errors.Is(err, uplink.ErrRefused) || !strings.Contains(err.Error(), "ip link set eth0 up") {
		t.Errorf("mend a NIC that is down: %v", err)
	}
	run(t, l.host, "link del eth0")
	expect.Is(t, expect.Err(l.conn.Mend(t.Context(), rec, j)), fs.ErrNotExist, "mend a NIC that is gone")
	rec.State = uplink.Restoring
	_, _, err := l.conn.Check(t.Context(), rec)
	expect.That(t, errors.Is(err, uplink.ErrNotTaken), "check what is being given back: %v", err)
}

// meddler is a journal with a network manager that goes on with its work before a step.
type meddler struct {
	uplink.Journal
	before uplink.StepName
	does   func()
}

func (m *meddler) Save(record []byte) error {
	rec, err := uplink.ParseRecord(record)
	if err == nil && rec.Step == m.before && m.does != nil {
		does := m.does
		m.does = nil
		does()
	}
	return errors.Join(err, m.Journal.Save(record))
}

func TestAMendThatSomebodyUndidMeanwhileIsFinished(t *testing.T) {
	t.Parallel()
	for _, before := range []uplink.StepName{uplink.StepPort, uplink.StepRoutes, uplink.StepVerify, uplink.StepRelease, uplink.StepSettle} {
		t.Run(string(before), func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			rec, j := take(t, l, toBridge())
			run(t, l.host, "link set eth0 nomaster")
			m := &meddler{j, before, func() {
				run(t, l.host, "link set eth0 nomaster", "addr flush dev br0", "addr add 10.0.0.5/24 brd + dev eth0")
			}}
			_, err := l.conn.Mend(t.Context(), rec, m)
			if err != nil {
				if rec, err = uplink.ParseRecord(j.record); err == nil {
					rec, err = l.conn.Recover(t.Context(), rec, j)
				}
			} else {
				_, err = l.conn.Mend(t.Context(), rec, j)
			}
			must.Succeed(t, err)
			l.mustBeTaken(t, "finished", rec)
			l.mustReach(t, "finished")
		})
	}
}
