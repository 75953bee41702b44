package nstest

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/netns"
)

// Overload begins to count packets that get lost on their way between namespaces, by veth
// pairs, because a processor of the machine cannot keep up: its queue of what came in was
// full. That happens to any sender while others flood it, and is no fault of a network's.
// The function that it gives says how many may have been lost so since: as many as the
// processors say they dropped, and as the pairs' ends in these namespaces say they could
// not pass on, whichever is less.
func Overload(tb testing.TB, namespaces ...*netns.NS) (dropped func() int) {
	tb.Helper()
	before := dropsNow(tb, namespaces)
	return func() int {
		tb.Helper()
		after := dropsNow(tb, namespaces)
		links := 0
		for link, n := range after.links {
			links += n - before.links[link]
		}
		return max(min(after.processors-before.processors, links), 0)
	}
}

// drops are counters of what was dropped.
type drops struct {
	processors int // of the whole machine
	links      map[netLink]int
}

type netLink struct {
	ns   netns.ID
	name string
}

func dropsNow(tb testing.TB, namespaces []*netns.NS) drops {
	tb.Helper()
	d := drops{links: map[netLink]int{}}
	// A line a processor: the second number is of those dropped.
	err := eachLine("/proc/net/softnet_stat", 0, func(fields []string) error {
		n, err := strconv.ParseInt(fields[1], 16, 64)
		d.processors += int(n)
		return err
	})
	for _, ns := range namespaces {
		err = errors.Join(err, ns.Do(func() error {
			// A line a link: its name, eight numbers of what it received, and of what it sent
			// bytes, packets, errors and drops.
			return eachLine("/proc/thread-self/net/dev", 2, func(fields []string) error {
				n, err := strconv.Atoi(fields[12])
				d.links[netLink{ns.ID(), fields[0]}] = n
				return err
			})
		}))
	}
	if err != nil {
		tb.Fatalf("count what is dropped: %v", err)
	}
	return d
}

// eachLine gives the fields of a file's lines but for those of its head.
func eachLine(path string, head int, line func(fields []string) error) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for text := range strings.Lines(string(b)) {
		if head--; head >= 0 {
			continue
		}
		// A long number may follow a name's colon at once.
		if err := line(strings.Fields(strings.Replace(text, ":", " ", 1))); err != nil {
			return err
		}
	}
	return nil
}
