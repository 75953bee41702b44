package fault_test

import (
	"slices"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestPointsOfASweep(t *testing.T) {
	points := func(value string, calls int) []int {
		t.Helper()
		t.Setenv(fault.Variable, value)
		list, err := fault.Points(calls, 4)
		must.Succeed(t, err)
		return list
	}
	var parts []int
	for _, part := range []string{"1/3", "2/3", "3/3"} {
		parts = append(parts, points(part, 10)...)
	}
	slices.Sort(parts)
	all := points("all", 10)
	expect.That(t, slices.Equal(all, []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}) &&
		slices.Equal(all, parts), "all: %v; the parts together: %v", all, parts)
	one := points("7", 10)
	expect.That(t, slices.Equal(one, []int{7}), "the 7th: %v", one)
	for range 100 {
		sample := points("", 10)
		slices.Sort(sample)
		expect.That(t, len(slices.Compact(sample)) == 4 && sample[0] >= 1 && sample[3] <= 10, "a sample of four: %v", sample)
	}
	for _, value := range []string{"0", "some", "4/3", "0/3", "1/0", "/", "-1"} {
		t.Setenv(fault.Variable, value)
		if list, err := fault.Points(10, 4); err == nil {
			t.Errorf("%q: %v, want an error", value, list)
		}
	}
}

func TestStridesOfASweep(t *testing.T) {
	for value, want := range map[string][2]int{"all": {1, 1}, "7": {7, 0}, "2/3": {2, 3}, "1/1": {1, 1}} {
		t.Setenv(fault.Variable, value)
		if first, step, err := fault.Strides(4); err != nil || [2]int{first, step} != want {
			t.Errorf("%q: from %d by %d, %v, want %v", value, first, step, err, want)
		}
	}
	t.Setenv(fault.Variable, "")
	var from [6]int
	for range 1000 {
		first, step, err := fault.Strides(4)
		must.That(t, err == nil && step == 4 && first >= 1 && first <= 4,
			"a sample of one in four: from %d by %d, %v", first, step, err)
		from[first]++
	}
	for first, times := range from[1:5] {
		expect.That(t, times != 0, "a sample never begins at %d", 1+first)
	}
	t.Setenv(fault.Variable, "4/3")
	if first, step, err := fault.Strides(4); err == nil {
		t.Errorf("from %d by %d, want an error", first, step)
	}
}
