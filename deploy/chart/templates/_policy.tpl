{{- /* Schemas of the lists in a FabricPolicy. A list item is a value, a range or a pattern, as in
policy/value_lists.py. "podfabric-policy-ranges" compares the ends of ranges. */}}

{{- define "podfabric.policy.list" -}}
type: array
maxItems: 64
{{- end }}

{{- define "podfabric.policy.names" -}}
{{ include "podfabric.policy.list" . }}
items: {type: string, minLength: 1, maxLength: 256, pattern: '^[!-~]([ -~]*[!-~])?$'}
{{- end }}

{{- define "podfabric.policy.switches" -}}
{{ include "podfabric.policy.list" . }}
items: {x-kubernetes-preserve-unknown-fields: true, enum: [true, false, "*"]}
{{- end }}

{{- define "podfabric.policy.numbers" -}}
{{ include "podfabric.policy.list" . }}
items: {x-kubernetes-int-or-string: true, minimum: 0, maximum: 9999999999, maxLength: 21, pattern: '^(\*|[0-9]{1,10}(-[0-9]{1,10})?)$'}
{{- end }}

{{- define "podfabric.policy.vlans" -}}
{{- $vlan := "([1-3]?[0-9]{1,3}|40[0-8][0-9]|409[0-4])" -}}
{{ include "podfabric.policy.list" . }}
items: {x-kubernetes-int-or-string: true, minimum: 0, maximum: 4094, maxLength: 9, pattern: '^(\*|{{ $vlan }}(-{{ $vlan }})?)$'}
{{- end }}

{{- /* Any of the 15 bits below the bit of a full member is set. */}}
{{- define "podfabric.policy.pkey" -}}
0[xX]([0-9a-fA-F]{0,3}[1-9a-fA-F]|[0-9a-fA-F]{0,2}[1-9a-fA-F]0|[0-9a-fA-F]?[1-9a-fA-F]00|[1-79a-fA-F]000)
{{- end }}

{{- define "podfabric.policy.pkeys" -}}
{{- $pkey := include "podfabric.policy.pkey" . -}}
{{ include "podfabric.policy.list" . }}
items: {x-kubernetes-int-or-string: true, minimum: 1, maximum: 65535, maxLength: 13, not: {enum: [32768]}, pattern: '^(\*|{{ $pkey }}(-{{ $pkey }})?)$'}
{{- end }}

{{- /* The number of bytes in the argument, with colons between them. */}}
{{- define "podfabric.policy.bytes" -}}
{{- $bytes := printf "[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){%d}" (sub . 1) -}}
{{ include "podfabric.policy.list" . }}
items: {type: string, maxLength: {{ mul . 6 }}, pattern: '^(\*|{{ $bytes }}(-{{ $bytes }})?)$'}
{{- end }}

{{- /* Texts of a selector of devices, which a pattern describes. */}}
{{- define "podfabric.policy.selected" -}}
type: array
minItems: 1
maxItems: 16
items: {type: string, minLength: 1, maxLength: 64, pattern: '^{{ . }}$'}
{{- end }}
