// Package docker tests tombolod as a network driver of a real dockerd, on a LAN with a router: testdata/lab.sh makes both,
// in namespaces of their own, and each of the other scripts there is a test.
package docker
