package nftnl

// DoctorName is what the kernel calls a doctor that makes its table: the keeper need not look at that change.
const DoctorName = "tombolo-doctor"
