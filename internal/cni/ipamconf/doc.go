// Package ipamconf makes an allocator of the ipam section of a netconf and of CNI_ARGS:
// host-local and static by package ipam in this process, any other type by running the
// plugin of that name.
//
// Errors about the configuration, and those of plugins, are [*Error], or several of these
// joined, the most important one first: they hold the CNI error object. What package ipam
// says of reservations is passed on as it is.
package ipamconf
