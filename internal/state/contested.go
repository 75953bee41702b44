package state

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// Contested says that somebody undoes again and again what tombolod puts right of the
// firewall.
type Contested struct {
	Version int       `json:"version,omitempty"`
	At      time.Time // when it was put right last
	Times   int       // how often it was, since it began
	What    string    // what was undone last
	By      string    // the program that changed the firewall last, as the kernel calls it
}

func (d *Dir) contestedPath() string { return d.path + "/contested.json" }

// SetContested writes down that the firewall is contested; nil is that it is not. It is for the
// keeper alone.
func (d *Dir) SetContested(f *Contested) error {
	var err error
	if f == nil {
		err = file.Remove(d.contestedPath())
	} else {
		// A name of its own: nobody else writes it, and Clean may run meanwhile.
		err = file.Replace(d.contestedPath()+".new", unix.O_TRUNC, d.contestedPath(), encode(&f.Version, f))
	}
	if err != nil {
		return fmt.Errorf("write down who changes the firewall: %w", err)
	}
	return nil
}

// Contested reads what SetContested wrote, nil if there is nothing.
func (d *Dir) Contested() (*Contested, error) {
	data, err := readFile(d.contestedPath())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	f := new(Contested)
	if err == nil {
		err = decode(data, &f.Version, f)
	}
	if err != nil {
		return nil, fmt.Errorf("read who changes the firewall: %w", err)
	}
	return f, nil
}
