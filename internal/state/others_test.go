package state

import (
	"errors"
	"os"
	"slices"
	"testing"
)

// What attachments of other programs' have is on record apart from ours: who lists ours does not see
// it. It ends with the epoch as ours does.
func TestRecordsOfOtherProgramsAttachmentsAreApart(t *testing.T) {
	t.Parallel()
	d, n := newDirOn(t)
	epoch, _ := enter(t, d)
	for dir, id := range map[*Dir]string{d: "own", d.Others(): "other"} {
		a := sample(id)
		a.Epoch = epoch.Token()
		create(t, dir, a)
	}
	own, _, err := d.List("cbr0")
	if err != nil || !slices.Equal(containers(own), []string{"own"}) || own[0].Other {
		t.Errorf("ours are %v, %v", containers(own), err)
	}
	others, _, err := d.ListOthers()
	if err != nil || !slices.Equal(containers(others), []string{"other"}) || !others[0].Other {
		t.Fatalf("others are %v, %v", containers(others), err)
	}
	if _, err := d.Load("cbr0", others[0].Hash()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("load: %v", err)
	}
	for _, a := range append(own, others...) {
		if found, err := d.Find("cbr0", a.Hash()); err != nil || found.ContainerID != a.ContainerID || found.Other != a.Other {
			t.Errorf("find %s: %+v, %v", a.ContainerID, found, err)
		}
	}
	// Of the same name, ours counts.
	again := sample("other")
	create(t, d, again)
	if found, err := d.Find("cbr0", again.Hash()); err != nil || found.Other {
		t.Errorf("find both: %+v, %v", found, err)
	}
	if err := d.Of(others[0]).Remove("cbr0", again.Hash()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Load("cbr0", again.Hash()); err != nil {
		t.Errorf("ours went with the other: %v", err)
	}

	create(t, d.Others(), sample("third"))
	n.setBoot(otherBoot)
	_, told := enter(t, d)
	if got := containers(told.Stale); !slices.Contains(got, "third") {
		t.Errorf("the callback was told of %v", got)
	}
	if left, _, err := d.ListOthers(); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", containers(left), err)
	}
}
