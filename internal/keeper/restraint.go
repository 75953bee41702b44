package keeper

import (
	"slices"
	"time"
)

// restraint keeps the keeper from fighting with another program over what both want to set. If a repair is
// undone again and again, a person or a program does so on purpose, and the keeper repairs only once a
// minute.
type restraint struct {
	undone []time.Time // when it was put right, within contestedFor
	times  int         // the same since it is contested; 0: it is not
	until  time.Time   // it is left alone
}

const (
	// If it was put right so often within the time, it is left alone for as long.
	contestedAfter = 3
	contestedFor   = time.Minute
)

// restraints are one for each thing that is fought over by itself.
type restraints map[string]*restraint

// of gives that of a thing.
func (l restraints) of(key string) *restraint {
	r := l[key]
	if r == nil {
		r = &restraint{}
		l[key] = r
	}
	return r
}

// recently says that any of them was put right within the last minute.
func (l restraints) recently() bool {
	return l.any((*restraint).recently)
}

// contested says that any of them is.
func (l restraints) contested() bool {
	return l.any(func(r *restraint) bool { return r.times > 0 })
}

func (l restraints) any(is func(*restraint) bool) bool {
	for _, r := range l {
		if is(r) {
			return true
		}
	}
	return false
}

// recently says that it was put right within the last minute.
func (r *restraint) recently() bool {
	n := len(r.undone)
	return n > 0 && now().Sub(r.undone[n-1]) < contestedFor
}

// putRight is told that it was, and says whether it is contested from now on, and whether
// it was so before.
func (r *restraint) putRight() (contested, before bool) {
	r.undone = append(slices.DeleteFunc(r.undone, func(t time.Time) bool { return now().Sub(t) > contestedFor }), now())
	before = r.times > 0
	if !before && len(r.undone) < contestedAfter {
		return false, false
	}
	if !before {
		r.times = len(r.undone) - 1
	}
	r.times++
	r.until = now().Add(contestedFor)
	return true, before
}

// calm is told that all is right, and says whether it was contested until now.
func (r *restraint) calm() bool {
	was := r.times > 0
	if was {
		r.times, r.undone = 0, nil
	}
	return was
}
