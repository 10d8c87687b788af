# shellcheck shell=bash
# A throw-away certificate authority and kubeconfigs for the development clusters.

# pki_ca DIR: ca.crt and ca.key, the same of the CA that may follow it (next-ca), what Pods trust (root-ca.crt), and
# the key pair that signs ServiceAccount tokens.
pki_ca() {
  local name
  mkdir -p "$1"
  for name in ca next-ca; do
    openssl ecparam -name prime256v1 -genkey -noout -out "$1/$name.key"
    openssl req -x509 -new -key "$1/$name.key" -sha256 -days 30 -subj "/CN=kruntimes-dev-$name" -out "$1/$name.crt" \
      -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature
  done
  cp "$1/ca.crt" "$1/root-ca.crt"
  openssl ecparam -name prime256v1 -genkey -noout -out "$1/sa.key"
  openssl ec -in "$1/sa.key" -pubout -out "$1/sa.pub" 2>/dev/null
  chmod 600 "$1"/*.key
}

# pki_cert DIR NAME SUBJECT USAGE [SAN [CA]]: DIR/NAME.{crt,key}; USAGE is clientAuth or serverAuth.
pki_cert() {
  local dir=$1 name=$2 subject=$3 usage=$4 san=${5:-} ca=${6:-ca}
  openssl ecparam -name prime256v1 -genkey -noout -out "$dir/$name.key"
  openssl req -new -key "$dir/$name.key" -subj "$subject" -out "$dir/$name.csr"
  {
    echo "extendedKeyUsage=$usage"
    echo keyUsage=critical,digitalSignature
    [[ -z $san ]] || echo "subjectAltName=$san"
  } >"$dir/$name.ext"
  openssl x509 -req -in "$dir/$name.csr" -CA "$dir/$ca.crt" -CAkey "$dir/$ca.key" -CAcreateserial \
    -days 30 -sha256 -extfile "$dir/$name.ext" -out "$dir/$name.crt" 2>/dev/null
  rm "$dir/$name.csr" "$dir/$name.ext"
  chmod 600 "$dir/$name.key"
}

# pki_kubeconfig DIR NAME SUBJECT SERVER FILE: a client certificate and a kubeconfig that carries it. It trusts both
# CAs: what the cluster is made of does not notice a rotation, only Pods do.
pki_kubeconfig() {
  local dir=$1 name=$2 subject=$3 server=$4 file=$5
  pki_cert "$dir" "$name" "$subject" clientAuth
  mkdir -p "$(dirname "$file")"
  (
    umask 077
    cat >"$file.tmp" <<YAML
apiVersion: v1
kind: Config
current-context: dev
contexts: [{name: dev, context: {cluster: dev, user: dev}}]
clusters:
- name: dev
  cluster:
    server: $server
    certificate-authority-data: $(cat "$dir/ca.crt" "$dir/next-ca.crt" | base64 -w0)
users:
- name: dev
  user:
    client-certificate-data: $(base64 -w0 "$dir/$name.crt")
    client-key-data: $(base64 -w0 "$dir/$name.key")
YAML
  )
  mv "$file.tmp" "$file"
}
