# bash completion for tombolo. Written from cmd/tombolo/commands.go: go test ./cmd/tombolo -run Generated -update

_tombolo() {
	local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
	local name= words= flags= places= place=- state=/run/tombolo given=0 i word
	COMPREPLY=()
	for ((i = 1; i < COMP_CWORD; i++)); do
		case ${COMP_WORDS[i]} in
		--state) state=${COMP_WORDS[++i]} ;;
		--client-id | --dns | --leases | --names | --network | --pod | --pods | --timeout | --to) ((++i)) ;;
		-*) ;;
		*)
			case $name in
			'') name=${COMP_WORDS[i]} ;;
			uplink) name+=" ${COMP_WORDS[i]}" ;;
			*) ((++given)) ;;
			esac
			;;
		esac
	done
	case $name in
	'') words='version ls networks map check repair gc doctor leases remove uplink validate install demo help' flags='--version' ;;
	'uplink') words='plan take restore status' ;;
	'version') flags='--json' places='' ;;
	'ls') flags='--json --network --pod --state' places='POD' ;;
	'networks') flags='--json --state' places='NETWORK' ;;
	'map') flags='--state --svg' places='' ;;
	'check') flags='--json --state --v' places='' ;;
	'repair') flags='--state' places='' ;;
	'gc') flags='--dry-run --json --state' places='NETWORK' ;;
	'doctor') flags='--dns --json --state --to' places='POD' ;;
	'leases') flags='--json --leases' places='' ;;
	'remove') flags='--state' places='NETWORK' ;;
	'uplink plan') flags='--keep-address --state --timeout' places='NIC BRIDGE' ;;
	'uplink take') flags='--client-id --keep-address --leases --state --timeout' places='NIC BRIDGE' ;;
	'uplink restore') flags='--leases --state' places='NIC BRIDGE' ;;
	'uplink status') flags='--json --leases --state' places='NIC' ;;
	'validate') flags='' places='FILE...' ;;
	'install') flags='--names --undo' places='DIR' ;;
	'demo') flags='--pods' places='' ;;
	'help') flags='' places='COMMAND...' ;;
	esac
	case $prev in
	--state | --leases) mapfile -t COMPREPLY < <(compgen -d -- "$cur") && return ;;
	--network) places=NETWORK given=0 ;;
	--client-id | --dns | --names | --pod | --pods | --timeout | --to) return ;;
	esac
	if [[ $cur == -* ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$flags --help" -- "$cur")
		return
	fi
	for word in $places; do
		if ((given-- == 0)) || [[ $word == *... ]]; then
			place=${word%...}
			break
		fi
	done
	case $place in
	NIC | BRIDGE) words=$(cd /sys/class/net && echo *) ;;
	NETWORK) words=$(cd "$state/networks" 2>/dev/null && for word in *.json; do [[ ! -e $word ]] || echo "${word%.json}"; done) ;;
	COMMAND) words='version ls networks map check repair gc doctor leases remove uplink validate install demo help' ;;
	FILE) mapfile -t COMPREPLY < <(compgen -f -- "$cur") && return ;;
	esac
	mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
}
complete -o filenames -F _tombolo tombolo
