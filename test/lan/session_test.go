package lan

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// session is a shell on the host whose input and output are a TCP connection from
// another machine of the LAN, as they are with sshd.
type session struct {
	testing.TB
	conn   *os.File
	lines  *bufio.Scanner
	stream *flow
	said   int
}

// login begins a session. It ends with the test, if not before.
func (l *lan) login(family int) *session {
	l.Helper()
	client, server, err := stream(l.other, l.host, family)
	must.Succeed(l, err)
	s := &session{TB: l, conn: client, lines: bufio.NewScanner(client), stream: &flow{tcp: true, out: client, in: server}}
	shell := exec.Command("sh")
	shell.Stdin, shell.Stdout, shell.Stderr = server, server, server
	// It may sit there and wait.
	err = errors.Join(
		unix.SetNonblock(int(server.Fd()), false),
		unix.SetsockoptTimeval(int(server.Fd()), unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{}),
		l.host.ns.Do(shell.Start))
	must.Succeed(l, err)
	l.Cleanup(func() {
		client.Close()
		shell.Process.Kill()
		shell.Wait()
		server.Close()
	})
	return s
}

// run runs a command in the session, which prints its output and exit status there.
func (s *session) run(command string) (output string, status int) {
	s.Helper()
	s.said++
	mark := fmt.Sprintf("ready %d ", s.said)
	// The answer has to come by the very link that is being taken.
	must.Succeed(s, s.conn.SetDeadline(time.Now().Add(time.Minute)))
	must.Succeed(s, expect.Err(fmt.Fprintf(s.conn, "%s\necho '%s'$?\n", command, mark)), "%s", command)
	var printed []string
	for s.lines.Scan() {
		if rest, ok := strings.CutPrefix(s.lines.Text(), mark); ok {
			must.Succeed(s, expect.Err(fmt.Sscan(rest, &status)))
			return strings.Join(printed, "\n"), status
		}
		printed = append(printed, s.lines.Text())
	}
	s.Fatalf("%s: the session has ended: %v; it had said:\n%s", command, s.lines.Err(), strings.Join(printed, "\n"))
	return "", 0
}

// wantRun is run, which is to succeed and to say something.
func (s *session) wantRun(command, says string) string {
	s.Helper()
	out, status := s.run(command)
	must.That(s, status == 0 && strings.Contains(out, says),
		"%s: exit status %d, output:\n%s\nwant 0 and %q", command, status, out, says)
	return out
}

// wantRetransmitted fails the test if more segments of the session had to be sent again.
func (s *session) wantRetransmitted(most int, when string) {
	s.Helper()
	n := 0
	// The answer to what was sent again may be on its way: see flow.retransmissions.
	for range looks {
		s.wantRun("echo here", "here")
		n = must.Of(s.stream.retransmissions()).Get(s)
		if n <= most {
			return
		}
	}
	s.Errorf("%s: %d segments of the session had to be sent again, want at most %d", when, n, most)
}

func TestTakeoverOfTheNICThatCarriesTheCallersOwnSession(t *testing.T) {
	for _, family := range both() {
		t.Run(fmt.Sprintf("IPv%d", family), func(t *testing.T) {
			l := newHost(t)
			before := l.layer3(nil)
			s := l.login(family)
			dir := t.TempDir()
			where := " --state " + filepath.Join(dir, "state") + " --leases " + filepath.Join(dir, "leases") + " "
			tombolo := program(t, "tombolo") + " uplink "
			ours := l.host.at(family).String()
			s.wantRun("ip -o address show dev "+nic, ours)

			s.wantRun(tombolo+"plan --take "+nic+" "+bridge, ours)
			wantSame(t, "a dry run", before, l.layer3(nil))

			s.wantRun(tombolo+"take"+where+nic+" "+bridge, nic+" is a port of "+bridge)
			s.wantRun("ip -o address show dev "+bridge, ours)
			l.wantBare(nic)
			s.wantRun(tombolo+"status"+where, nic+" on "+bridge+": taken")
			s.wantRetransmitted(duringTake().retransmitted, "taken")

			s.wantRun(tombolo+"restore"+where+nic+" "+bridge, nic+" has its addresses and routes back")
			s.wantRun("ip -o address show dev "+nic, ours)
			s.wantRetransmitted(duringRestore().retransmitted, "given back")
			l.wantNoLink(bridge)
			wantSame(t, "the host after the restore", before, l.layer3(nil))
		})
	}
}

// That the session goes by the NIC, and ends with it, is what makes its survival say
// anything.
func TestSessionGoesByTheNIC(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	s := l.login(4)
	s.wantRun("echo here", "here")
	ip(t, l.host.ns, "link set "+nic+" down")
	must.Succeed(t, s.conn.SetDeadline(time.Now().Add(500*time.Millisecond)))
	fmt.Fprintln(s.conn, "echo anybody")
	if s.lines.Scan() {
		t.Errorf("an answer came without a NIC: %s", s.lines.Text())
	}
}
