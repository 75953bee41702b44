package firewalld

import (
	"os"

	"golang.org/x/sys/unix"
)

// watch tells when files are renamed into a directory, or removed (inotify(7)), which it makes if need be. Where
// that cannot be had, it tells nothing: what changed is seen later.
func watch(dir string) (news <-chan struct{}, stop func()) {
	none := func() {}
	if os.MkdirAll(dir, 0o700) != nil {
		return nil, none
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, none
	}
	file := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_MOVED_TO|unix.IN_DELETE|unix.IN_ONLYDIR); err != nil {
		_ = file.Close()
		return nil, none
	}
	seen, ended := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(ended)
		for buf := make([]byte, 4<<10); ; {
			if _, err := file.Read(buf); err != nil {
				return
			}
			select {
			case seen <- struct{}{}:
			default:
			}
		}
	}()
	return seen, func() {
		_ = file.Close()
		<-ended
	}
}
