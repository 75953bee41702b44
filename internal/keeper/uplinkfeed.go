package keeper

import (
	"encoding/binary"
	"errors"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// news is what the kernel announces of a link, or of a link's addresses.
type news struct {
	lost  bool // something was, and everything is to be looked at; the rest says nothing
	index int
	facts *linkFacts // nil: it is about addresses
	gone  bool       // the link
}

// linkFacts are what matters of a link.
type linkFacts struct {
	name   string
	master int
	mtu    int
	mac    string
	up     bool
	// carrier is of uplinks: other readers of announcements leave it false.
	carrier bool
}

// feed has the announcements of all links and addresses of the host (rtnetlink(7)). A nil one hears
// nothing.
type feed struct {
	source source
	heard  chan []news
	stop   chan struct{}
	ended  chan struct{}
}

// source is what an nl.Feed is.
type source interface {
	Next() ([]netlink.Message, error)
	Close() error
}

func newFeed(cfg *nl.Config) (*feed, error) {
	conn, err := nl.Follow(unix.NETLINK_ROUTE, cfg, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return nil, err
	}
	return feedFrom(conn), nil
}

func feedFrom(s source) *feed {
	f := &feed{source: s, heard: make(chan []news, 16), stop: make(chan struct{}), ended: make(chan struct{})}
	go f.run()
	return f
}

// news gives what is heard; it is closed when there is nothing to hear any more.
func (f *feed) news() <-chan []news {
	if f == nil {
		return nil
	}
	return f.heard
}

func (f *feed) close() {
	close(f.stop)
	_ = f.source.Close() // of a socket that is only read from
	<-f.ended
}

func (f *feed) run() {
	defer close(f.ended)
	defer close(f.heard)
	for {
		messages, err := f.source.Next()
		list := newsOf(messages)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			list = []news{{lost: true}}
		case err != nil:
			return
		case len(list) == 0:
			continue
		}
		select {
		case f.heard <- list:
		case <-f.stop:
			return
		}
	}
}

// newsOf reads announcements. A message that does not parse counts as lost.
func newsOf(messages []netlink.Message) []news {
	var list []news
	for _, m := range messages {
		switch m.Header.Type {
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			n, err := linkNews(m)
			switch {
			case err != nil:
				list = append(list, news{lost: true})
			case n != nil:
				list = append(list, *n)
			}
		case unix.RTM_NEWADDR, unix.RTM_DELADDR:
			// struct ifaddrmsg
			if len(m.Data) < unix.SizeofIfAddrmsg {
				list = append(list, news{lost: true})
				continue
			}
			list = append(list, news{index: int(int32(binary.NativeEndian.Uint32(m.Data[4:])))})
		}
	}
	return list
}

// linkNews is nil for what is about the port of a bridge and not about a link.
func linkNews(m netlink.Message) (*news, error) {
	var l link.Link
	if err := l.Decode(m.Data, unix.IFLA_IFNAME, unix.IFLA_MASTER, unix.IFLA_MTU, unix.IFLA_ADDRESS); err != nil || l.Family == unix.AF_BRIDGE {
		return nil, err
	}
	return &news{index: l.Index, gone: m.Header.Type == unix.RTM_DELLINK, facts: &linkFacts{
		name: l.Name, master: l.Master, mtu: l.MTU, mac: string(l.MAC), up: l.Up(), carrier: l.Flags&unix.IFF_LOWER_UP != 0,
	}}, nil
}
