package lease

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// closers is how many sockets are closed at a time, and queue how many wait: each keeps
// the thread that closes it for 10 to 20 ms, and its pod's namespace alive until then.
const (
	closers = 4
	queue   = 256
)

// grace is left to the sender to close its own copy: the last close takes the time.
const grace = 50 * time.Millisecond

// taken is a descriptor, and when it may be closed.
type taken struct {
	fd  int
	due time.Time
}

// HandOver closes file descriptors of the caller's, by way of the keeper: it is the last
// close of an AF_PACKET socket that takes the kernel 10 to 20 ms. If no keeper runs,
// or it is busy, the caller's own close is the last. The error is one of closing; that
// the keeper did not take the descriptors is none.
func (d *Dir) HandOver(fds ...int) error {
	// A stopped keeper would keep them, and the pod's namespace with them.
	if len(fds) > 0 && d.CheckKeeper() == nil {
		_ = d.send(fds)
	}
	var errs []error
	for _, fd := range fds {
		errs = append(errs, unix.Close(fd))
	}
	return errors.Join(errs...)
}

func (d *Dir) send(fds []int) error {
	dir, addr, err := d.socketAddr()
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	_, err = file.Restart(func() (int, error) {
		return 0, unix.Sendmsg(s, []byte{0}, unix.UnixRights(fds...), &unix.SockaddrUnix{Name: addr}, unix.MSG_DONTWAIT)
	})
	return err
}

// socketAddr gives the socket's address by way of a descriptor of the directory, since
// sun_path has room for 107 bytes only.
func (d *Dir) socketAddr() (dir int, addr string, _ error) {
	dir, err := file.OpenAny(d.path, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return -1, "", err
	}
	return dir, "/proc/self/fd/" + strconv.Itoa(dir) + "/" + keeperSocket, nil
}

// Closer closes what HandOver sends.
type Closer struct {
	conn *net.UnixConn
	path string
	work sync.WaitGroup
}

// Closer starts to take what HandOver sends. Only the keeper may call it: a socket that
// an earlier keeper left is removed.
func (p *Heartbeat) Closer() (*Closer, error) {
	path := p.dir.path + "/" + keeperSocket
	if err := file.Remove(path); err != nil {
		return nil, fmt.Errorf("take sockets to close: %w", err)
	}
	dir, addr, err := p.dir.socketAddr()
	if err != nil {
		return nil, fmt.Errorf("take sockets to close: %w", err)
	}
	conn, err := listenPrivately(addr)
	if err := errors.Join(err, unix.Close(dir)); err != nil {
		return nil, fmt.Errorf("take sockets to close: %w", err)
	}
	c := &Closer{conn: conn, path: path}
	fds := make(chan taken, queue)
	c.work.Go(func() { c.receive(fds) })
	for range closers {
		c.work.Go(func() {
			for t := range fds {
				time.Sleep(time.Until(t.due))
				unix.Close(t.fd)
			}
		})
	}
	return c, nil
}

// listenPrivately listens at a socket that nobody else may send to, whatever the umask is:
// the kernel takes the mode of the file from that of the socket, which is set before there
// is a file. And it has the kernel name the sender.
func listenPrivately(addr string) (*net.UnixConn, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	socket := os.NewFile(uintptr(fd), "keeper")
	defer socket.Close()
	if err := unix.Fchmod(fd, 0o600); err != nil {
		return nil, fmt.Errorf("chmod: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		return nil, fmt.Errorf("ask for who sends: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: addr}); err != nil {
		return nil, fmt.Errorf("bind: %w", err)
	}
	conn, err := net.FilePacketConn(socket) // of its own descriptor
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

func (c *Closer) receive(fds chan<- taken) {
	defer close(fds)
	// Room for more descriptors than are sent, so that none gets lost open.
	buf, oob := make([]byte, 16), make([]byte, unix.CmsgSpace(64*4)+unix.CmsgSpace(unix.SizeofUcred))
	for {
		_, n, _, _, err := c.conn.ReadMsgUnix(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		own, list := rights(oob[:max(n, 0)])
		for _, fd := range list {
			if !own {
				unix.Close(fd) // a socket that was not meant for others: its sender waits for the close
				continue
			}
			fds <- taken{fd, time.Now().Add(grace)}
		}
	}
}

// rights gives the descriptors that came with a message, and whether it came from root or
// from the keeper's own user.
func rights(oob []byte) (own bool, fds []int) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return false, nil
	}
	for i := range messages {
		if who, err := unix.ParseUnixCredentials(&messages[i]); err == nil {
			own = who.Uid == 0 || int(who.Uid) == unix.Geteuid()
		}
		if got, err := unix.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return own, fds
}

// Close stops, after everything that was taken is closed.
func (c *Closer) Close() error {
	err := c.conn.Close()
	c.work.Wait()
	if removed := os.Remove(c.path); !errors.Is(removed, os.ErrNotExist) {
		err = errors.Join(err, removed)
	}
	return err
}
