package state

import (
	"os"
	"testing"
	"time"
)

func TestContestedIsKeptAndForgotten(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	want := Contested{At: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), Times: 4, What: `chain "x"`, By: "nft\n"}
	for range 2 {
		if err := d.SetContested(&want); err != nil {
			t.Fatal(err)
		}
		got, err := d.Contested()
		if err != nil || got == nil || *got != want {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	for range 2 {
		if err := d.SetContested(nil); err != nil {
			t.Error(err)
		}
		if got, err := d.Contested(); got != nil || err != nil {
			t.Errorf("%+v, %v", got, err)
		}
	}
	if err := os.WriteFile(d.contestedPath(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Contested(); err == nil {
		t.Errorf("damaged: %+v", got)
	}
}
