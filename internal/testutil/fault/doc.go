// Package fault runs a program and has something go wrong at one of its system calls:
// the process is killed before the call, or the call fails in place of being carried out.
// A sweep does so at each of them in turn.
//
//	func TestMain(m *testing.M) { fault.Main(); … }
//
//	run, err := fault.Start(ns, exec.Command(program), fault.Fault{At: 7, Kind: fault.Kill})
//	outcome := run.Wait()
//
// Calls are counted over all threads of the process and of those that it starts. Those
// of Go's runtime do not count, which ask for memory, for threads and for the time: they
// change nothing that outlives the process, and the runtime does not survive an error of
// theirs. Which thread is first differs from run to run, so the nth call is not always
// the same one; Outcome says which it was.
//
// The kernel asks for leave for each call by a seccomp listener, see seccomp_unotify(2).
// Nothing is traced by ptrace(2), so that the program runs at nearly its own pace.
package fault
