package inspect

import (
	"fmt"
	"time"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// contestedFor is how long what tombolod wrote down holds: it looks once in a minute.
const contestedFor = 3 * time.Minute

// RefuseContested names the program that undoes what tombolod repairs of the firewall.
func RefuseContested(dir *state.Dir) error {
	f, err := dir.Contested()
	if err != nil {
		return fail.State(err)
	}
	if f == nil || time.Since(f.At) > contestedFor {
		return nil
	}
	by := "another program"
	if f.By != "" {
		by = fmt.Sprintf("another program (the last to change it: %q)", f.By)
	}
	return fail.Errorf(fail.ErrObstructed, "%s undoes what pods need of the firewall: tombolod has put it back %d times, and now does so only once a minute; the last time it was: %.200q: have that program leave it alone",
		by, f.Times, f.What)
}
