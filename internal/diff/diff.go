// Package diff collects differences between an expected and an actual state, for the Check functions of other
// packages.
package diff

import (
	"strconv"

	"github.com/tombolo-cni/tombolo"
)

// List is a list of differences.
type List []tombolo.Difference

// Add adds a difference in one attribute (what) of an object, unless want and have are equal. An empty want means that
// the attribute should not exist. An empty have means that it does not exist.
func (l *List) Add(object, what, want, have string) {
	if want != have {
		*l = append(*l, tombolo.Difference{Object: object, What: what, Want: want, Have: have})
	}
}

// Flag adds a difference if a setting should be on and is off, or the reverse.
func (l *List) Flag(object, what string, want, have bool) {
	l.Add(object, what, onOff(want), onOff(have))
}

// Number adds a difference if the numbers want and have differ.
func (l *List) Number(object, what string, want, have int) {
	l.Add(object, what, strconv.Itoa(want), strconv.Itoa(have))
}

// Up adds a difference unless a link is up.
func (l *List) Up(object string, is bool) {
	if !is {
		l.Add(object, "link", "up", "down")
	}
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}
