package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// damages are ways in which a record's file may be spoilt, by its content.
func damages(t *testing.T, record []byte, words bool) map[string]func(path string) error {
	t.Helper()
	all := map[string]func(path string) error{
		"a directory":       func(path string) error { return os.MkdirAll(path+"/of/others", 0o700) },
		"a symbolic link":   func(path string) error { return os.Symlink("/etc/passwd", path) },
		"a pipe":            func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a newer version's": content(bytes.ReplaceAll(record, []byte(`"version":1,`), []byte(`"version":99,`))),
		"empty":             content(nil),
		"cut short":         content(record[:len(record)/3]),
		"zeros":             content(make([]byte, len(record))),
		"a list":            content([]byte("[]\n")),
	}
	if !words {
		return all
	}
	var fields any
	line := bytes.TrimSpace(record)
	line = line[bytes.LastIndexByte(line, '\n')+1:]
	err := json.Unmarshal(line, &fields)
	must.That(t, err == nil, "%v: %s", err, record)
	alter(fields, "", map[string]bool{}, func(where string) {
		text := append(marshal(t, fields), '\n')
		all[where] = content(text)
	})
	return all
}

func content(text []byte) func(path string) error {
	return func(path string) error { return os.WriteFile(path, text, 0o600) }
}

// alter puts other words, and once for each type a value of another one, in place of the values that fields have, and
// calls each time.
func alter(fields any, path string, types map[string]bool, each func(where string)) {
	replace := func(where string, old any, set func(any)) {
		var bad []any
		if _, text := old.(string); text {
			bad = []any{"no such word/"}
		}
		if kind := fmt.Sprintf("%T", old); !types[kind] {
			types[kind] = true
			bad = append(bad, []any{map[string]any{}}, -7)
		}
		for _, value := range bad {
			set(value)
			each(fmt.Sprintf("%s: %v", where, value))
		}
		set(old)
	}
	switch fields := fields.(type) {
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			old := fields[name]
			replace(path+name, old, func(v any) { fields[name] = v })
			alter(old, path+name+".", types, each)
		}
	case []any:
		for i, old := range fields {
			alter(old, fmt.Sprintf("%s%d.", path, i), types, each)
		}
	}
}

// spoilt is a node with a network on which one pod at a time has an address.
type spoilt struct {
	*node
	add  func(t *testing.T, p *pod)
	take func(t *testing.T, p *pod) // has the pod go
	net  string
}

func (s *spoilt) record(p *pod) string {
	w := network{name: s.net}
	return filepath.Join(s.state, "attachments", s.net, strings.TrimPrefix(w.port(p), "veth")+".json")
}

func (s *spoilt) network() string { return filepath.Join(s.state, "networks", s.net+".json") }

// ways are those in which a pod may go.
func ways() map[string]func(t *testing.T) *spoilt {
	everything := func(t *testing.T) (*spoilt, *network) {
		n := newNode(t)
		w := n.portnet(conf{"ipam": small("2"), "macspoofchk": true})
		limits := map[string]any{"egressRate": 8_000_000, "egressBurst": 80_000, "ingressRate": 8_000_000, "ingressBurst": 80_000}
		return &spoilt{node: n, net: w.name, add: func(t *testing.T, p *pod) {
			t.Helper()
			w.add(p, publish(t, "8080:80/tcp", "5300:53/udp"), func(rt *libcni.RuntimeConf) { rt.CapabilityArgs["bandwidth"] = limits })
		}}, w
	}
	return map[string]func(t *testing.T) *spoilt{
		"DEL": func(t *testing.T) *spoilt {
			s, w := everything(t)
			s.take = func(_ *testing.T, p *pod) {
				w.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
			}
			return s
		},
		"GC": func(t *testing.T) *spoilt {
			s, w := everything(t)
			s.take = func(*testing.T, *pod) { w.gc() }
			return s
		},
		"tombolo gc": func(t *testing.T) *spoilt {
			s, w := everything(t)
			s.take = func(t *testing.T, p *pod) {
				w.kills(t, p)
				o := s.operate("gc", "--state", s.state)
				if strings.HasSuffix(o.stdout, "have the runtime DEL it or call GC\n") && o.status == 4 {
					w.gc()
				} else if o.status != 0 {
					t.Errorf("%+v", o)
				}
			}
			return s
		},
		"DEL of a list by name": func(t *testing.T) *spoilt {
			of := newSide(t, referenceDir(t), byName())
			list := []string{
				`{"type":"bridge","isGateway":true,"ipMasq":true,"macspoofchk":true,"ipam":{"type":"host-local","dataDir":"STATE/n","subnet":"10.5.0.0/24","rangeStart":"10.5.0.2","rangeEnd":"10.5.0.2"}}`,
				`{"type":"tuning","dataDir":"STATE/t","mtu":1400}`,
				portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`, `{"hostPort":5300,"containerPort":53,"protocol":"udp"}`),
				`{"type":"firewall"}`,
				`{"type":"bandwidth","ingressRate":8000000,"ingressBurst":80000,"egressRate":8000000,"egressBurst":80000}`,
			}
			do := func(what string, p *pod) {
				of.pods[p.id] = p
				of.chain(what, p.id, list)
			}
			return &spoilt{
				node: of.node, net: "net",
				add:  func(_ *testing.T, p *pod) { do("ADD", p) },
				take: func(_ *testing.T, p *pod) { do("DEL", p) },
			}
		},
	}
}

// Whatever a record says, or has become, its pod goes, with all that it has, and the next one gets its address.
func TestNoContentOfARecordKeepsAPodFromGoing(t *testing.T) {
	t.Parallel()
	for way, scene := range ways() {
		for _, of := range []string{"attachment", "network", "both"} {
			nstest.RunParallel(t, way+", "+of, func(t *testing.T) {
				s := scene(t)
				paths := func(p *pod) []string {
					return map[string][]string{"attachment": {s.record(p)}, "network": {s.network()}, "both": {s.record(p), s.network()}}[of]
				}
				text := func(p *pod) []byte { return []byte(readFile(t, paths(p)[0])) }
				model, words := s.pod("model"), of == "attachment"
				s.add(t, model)
				names := slices.Sorted(maps.Keys(damages(t, text(model), words)))
				s.take(t, model)
				s.wantNothing()
				for _, damage := range names {
					ok := t.Run(damage, func(t *testing.T) {
						s.TB = t
						p := s.pod("goes")
						s.add(t, p)
						spoil := damages(t, text(p), words)[damage]
						for _, path := range paths(p) {
							must.Succeed(t, errors.Join(os.Remove(path), spoil(path)))
						}
						s.take(t, p)
						s.wantNothing()
						if of != "attachment" {
							must.Succeed(t, os.RemoveAll(s.network())) // no ADD replaces a directory
						}
					})
					if !ok {
						s = scene(t)
					}
				}
			})
		}
	}
}

// A disk that is full takes no record, and keeps no pod from going.
func TestNoFullDiskKeepsAPodFromGoing(t *testing.T) {
	t.Parallel()
	for way, scene := range ways() {
		nstest.RunParallel(t, way, func(t *testing.T) {
			s := scene(t)
			must.Succeed(t, os.Mkdir(s.state, 0o700))
			must.Succeed(t, unix.Mount("none", s.state, "tmpfs", 0, "size=1m"))
			t.Cleanup(func() { expect.Success(t, unix.Unmount(s.state, unix.MNT_DETACH)) })
			p := s.pod("goes")
			s.add(t, p)
			filler := s.state + "/filler"
			err := os.WriteFile(filler, make([]byte, 2<<20), 0o600)
			must.That(t, errors.Is(err, unix.ENOSPC), "the disk is not full: %v", err)
			err = os.WriteFile(s.state+"/more", []byte("more"), 0o600)
			must.That(t, errors.Is(err, unix.ENOSPC), "the disk is not full: %v", err)
			s.take(t, p)
			s.wantNothing()
			must.Succeed(t, os.RemoveAll(filler))
			s.add(t, s.pod("next"))
		})
	}
}
