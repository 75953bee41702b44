module example.com/embed

go 1.26.0

require github.com/tombolo-cni/tombolo v0.0.0

require golang.org/x/sys v0.49.0 // indirect

replace github.com/tombolo-cni/tombolo => ../..
