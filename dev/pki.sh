# shellcheck shell=bash
# A throw-away certificate authority and kubeconfigs for the development clusters.

# pki_ca DIR: ca.crt and ca.key, plus the key pair that signs ServiceAccount tokens.
pki_ca() {
  mkdir -p "$1"
  openssl ecparam -name prime256v1 -genkey -noout -out "$1/ca.key"
  openssl req -x509 -new -key "$1/ca.key" -sha256 -days 30 -subj /CN=kruntimes-dev -out "$1/ca.crt" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature
  openssl ecparam -name prime256v1 -genkey -noout -out "$1/sa.key"
  openssl ec -in "$1/sa.key" -pubout -out "$1/sa.pub" 2>/dev/null
  chmod 600 "$1"/*.key
}

# pki_cert DIR NAME SUBJECT USAGE [SAN]: DIR/NAME.{crt,key}; USAGE is clientAuth or serverAuth.
pki_cert() {
  local dir=$1 name=$2 subject=$3 usage=$4 san=${5:-}
  openssl ecparam -name prime256v1 -genkey -noout -out "$dir/$name.key"
  openssl req -new -key "$dir/$name.key" -subj "$subject" -out "$dir/$name.csr"
  {
    echo "extendedKeyUsage=$usage"
    echo keyUsage=critical,digitalSignature
    [[ -z $san ]] || echo "subjectAltName=$san"
  } >"$dir/$name.ext"
  openssl x509 -req -in "$dir/$name.csr" -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -CAcreateserial \
    -days 30 -sha256 -extfile "$dir/$name.ext" -out "$dir/$name.crt" 2>/dev/null
  rm "$dir/$name.csr" "$dir/$name.ext"
  chmod 600 "$dir/$name.key"
}

# pki_kubeconfig DIR NAME SUBJECT SERVER FILE: a client certificate and a kubeconfig that carries it.
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
    certificate-authority-data: $(base64 -w0 "$dir/ca.crt")
users:
- name: dev
  user:
    client-certificate-data: $(base64 -w0 "$dir/$name.crt")
    client-key-data: $(base64 -w0 "$dir/$name.key")
YAML
  )
  mv "$file.tmp" "$file"
}
