package state

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// runHelper is a process of its own in the tests of locks and crashes.
func runHelper(name string, args []string) int {
	helpers := map[string]func([]string) error{
		"hold":   helpHold,
		"wait":   helpWait,
		"enter":  helpEnter,
		"begin":  helpBegin,
		"churn":  helpChurn,
		"full":   helpFull,
		"add":    helpAdd,
		"uplink": helpUplink,
	}
	if err := helpers[name](args); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		return 1
	}
	return 0
}

// openFor opens the directory that the first argument names.
func openFor(args []string) (*Dir, error) { return Open(args[0]) }

// sign says something to the test and waits for its sign to go on.
func sign(text string) {
	fmt.Println(text)
	io.Copy(io.Discard, os.Stdin)
}

func modeOf(s string) Mode {
	if s == Exclusive.String() {
		return Exclusive
	}
	return Shared
}

// helpHold takes the lock without waiting: dir, mode.
func helpHold(args []string) error {
	d, err := openFor(args)
	if err != nil {
		return err
	}
	l, err := d.Lock(canceled(), modeOf(args[1]))
	if errors.Is(err, ErrLocked) {
		sign("locked")
		return nil
	}
	if err != nil {
		return err
	}
	sign("held")
	return l.Close()
}

// privateMount hides a directory under a tmpfs that only this process sees. It needs
// a mount namespace of its own.
func privateMount(dir, options string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount("tmpfs", dir, "tmpfs", 0, options)
}

// helpWait takes the lock however long it takes: dir, mode.
func helpWait(args []string) error {
	d, err := openFor(args)
	if err != nil {
		return err
	}
	fmt.Println("waiting")
	l, err := d.Lock(context.Background(), modeOf(args[1]))
	if err != nil {
		return err
	}
	sign("held")
	return l.Close()
}

// helpEnter enters on a sign, and prints the token: dir.
func helpEnter(args []string) error {
	d, err := openFor(args)
	if err != nil {
		return err
	}
	sign("ready")
	l, epoch, err := d.Enter(context.Background())
	if err != nil {
		return err
	}
	fmt.Println(epoch.Token())
	return l.Close()
}

// helpChurn writes and removes records until it is killed, and prints a line after
// each round: dir.
func helpChurn(args []string) error {
	d, err := openFor(args)
	if err != nil {
		return err
	}
	for round := 0; ; round++ {
		a := sample(strconv.Itoa(round % 7))
		if err := d.Remove(a.Network, a.Hash()); err != nil {
			return err
		}
		p, err := d.Create(a)
		if err != nil {
			return err
		}
		if err := p.Commit(a); err != nil {
			return err
		}
		if err := d.SaveNetwork(sampleNetwork("cbr0")); err != nil {
			return err
		}
		fmt.Println(round)
	}
}

// helpBegin begins an ADD and stays there: dir.
func helpBegin(args []string) error {
	d, err := openFor(args)
	if err != nil {
		return err
	}
	p, err := d.Create(sample("begun"))
	if err != nil {
		return err
	}
	sign("begun")
	return p.Close()
}

// helpFull runs out of space, in Create and in Commit: dir.
func helpFull(args []string) error {
	// One page for a record, in a file system that has no more.
	if err := privateMount(args[0], "size=4k"); err != nil {
		return err
	}
	d, err := openFor(args)
	if err != nil {
		return err
	}
	first, second := sample("first"), sample("second")
	first.DataDir = "/" + string(make([]byte, 400)) // some 2,400 bytes of escapes
	p, err := d.Create(first)
	if err != nil {
		return err
	}
	if _, err := d.Create(second); !errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("Create on a full file system: %v", err)
	}
	if err := p.Commit(first); !errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("Commit on a full file system: %v", err)
	}
	found, bad, err := d.List("cbr0")
	if err != nil || len(bad) > 0 || len(found) != 1 {
		return fmt.Errorf("List: %v, %v, %v", found, bad, err)
	}
	if found[0].State != Adding || first.State != Adding {
		return fmt.Errorf("state %q, and %q in memory, after a Commit that failed", found[0].State, first.State)
	}
	return nil
}

// helpAdd does what an ADD does with its state: dir. The calls between its two looks
// at files that do not exist are what the test counts.
func helpAdd(args []string) error {
	d, err := openFor(args)
	if err != nil {
		return err
	}
	unix.Access("/tombolo-add-begins", 0)
	l, _, err := d.Enter(context.Background())
	if err != nil {
		return err
	}
	a := sample("added")
	p, err := d.Create(a)
	if err != nil {
		return err
	}
	if _, err := d.LoadNetwork("cbr0"); err != nil {
		return err
	}
	if err := p.Commit(a); err != nil {
		return err
	}
	err = l.Close()
	unix.Access("/tombolo-add-ends", 0)
	return err
}

// helpUplink saves an uplink's record under the exclusive lock until it is killed, and prints a
// line after each: dir, NIC.
func helpUplink(args []string) error {
	d, err := openFor(args)
	if err != nil {
		return err
	}
	if _, err := d.Lock(context.Background(), Exclusive); err != nil {
		return err
	}
	f := d.Uplink(args[1])
	for step := 0; ; step++ {
		if err := f.Save(fmt.Appendf(nil, `{"step":%d}`, step)); err != nil {
			return err
		}
		fmt.Println(step)
	}
}
