//! `quorate cert`: makes a cluster's certificates without other tools. The cluster's own authority
//! signs one certificate per replica, for all its listeners, and one per operator or client.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use admin::{AdminRole, role_name};
use anyhow::{Context as _, ensure};
use lab::terminal::print;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use time::{Duration, OffsetDateTime};

use crate::file_permissions::private_folder;

/// Name of the authority's files, without their extensions.
const CA: &str = "ca";
/// Names in each replica's certificate for commands and probes on its own host.
const OWN_HOST: [&str; 3] = ["localhost", "127.0.0.1", "::1"];
/// Maximum length of a common name, in bytes.
const CLIENT_NAME_BYTES_MAX: usize = 64;
/// Time by which the start of a certificate's validity precedes its creation, because clocks
/// differ.
const BACKDATED: Duration = Duration::hours(1);

/// Subcommands of `quorate cert`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum CertCommand {
    /// Make a cluster's certificate authority: ca.crt, and ca.key, which no replica needs
    Ca(CaArgs),
    /// Make a certificate per replica, for its peers, clients and operators
    Node(NodeArgs),
    /// Make a certificate for an operator or a client
    Client(ClientArgs),
}

/// Arguments of `quorate cert ca`.
#[derive(Debug, clap::Args)]
pub(super) struct CaArgs {
    /// Directory to write to; created if missing
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Name of the cluster, as `cluster.name`
    #[arg(long, value_name = "NAME", default_value = "quorate")]
    cluster: String,
    /// Days for which it is valid
    #[arg(long, value_name = "N", default_value_t = 3650, value_parser = days())]
    days: u32,
}

/// Arguments of `quorate cert node`.
#[derive(Debug, clap::Args)]
pub(super) struct NodeArgs {
    /// A replica's id, and the addresses and names at which clients and operators reach it
    /// (`1=10.0.0.1,gpu-1.example`); may be repeated. Peers check only the id
    #[arg(long, value_name = "ID[=HOST,...]", required = true)]
    replica: Vec<ReplicaHosts>,
    #[command(flatten)]
    signed: SignedArgs,
}

/// Arguments of `quorate cert client`.
#[derive(Debug, clap::Args)]
pub(super) struct ClientArgs {
    /// Holder of the certificate: its common name, under which the audit lists an operator
    #[arg(value_parser = client_name)]
    name: String,
    /// Make its holder an operator, who needs no token if `tls.admin.client_ca_file` trusts the
    /// authority. `viewer` reads, `operator` changes routing, `admin` changes the cluster
    #[arg(long, value_name = "ROLE")]
    role: Option<AdminRole>,
    #[command(flatten)]
    signed: SignedArgs,
}

#[derive(Debug, clap::Args)]
struct SignedArgs {
    /// Directory to write to; created if missing
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Directory of ca.crt and ca.key. Default: that of --out
    #[arg(long, value_name = "DIR")]
    ca: Option<PathBuf>,
    /// Name of the cluster, as `cluster.name`
    #[arg(long, value_name = "NAME", default_value = "quorate")]
    cluster: String,
    /// Days for which it is valid
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = days())]
    days: u32,
}

/// A value of `--replica`: a replica's id, and the host names and addresses for its certificate.
#[derive(Debug, Clone)]
struct ReplicaHosts {
    id: u8,
    hosts: Vec<String>,
}

impl std::str::FromStr for ReplicaHosts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (id, hosts) = text.split_once('=').unwrap_or((text, ""));
        let id = id.parse().ok().filter(|id| *id > 0);
        let id = id.ok_or("expected an id from 1 to 255")?;
        let hosts: Vec<_> = hosts.split(',').filter(|host| !host.is_empty()).collect();
        match hosts.iter().find(|host| !is_host(host)) {
            Some(host) => Err(format!("{host:?} is neither an IP address nor a host name")),
            None => Ok(Self {
                id,
                hosts: hosts.into_iter().map(str::to_owned).collect(),
            }),
        }
    }
}

fn is_host(host: &str) -> bool {
    let is_label = |label: &str| {
        let mut bytes = label.bytes();
        !label.is_empty() && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    host.parse::<IpAddr>().is_ok() || host.split('.').all(is_label)
}

fn days() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=36_500)
}

fn client_name(text: &str) -> Result<String, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
    let is_short = (1..=CLIENT_NAME_BYTES_MAX).contains(&text.len());
    let is_name = is_short && text.bytes().all(is_plain) && !text.starts_with('.');
    let is_taken = text == CA || text.starts_with("replica-");
    match (is_name, is_taken) {
        (true, false) => Ok(text.to_owned()),
        (true, true) => Err("the file of an authority or a replica has this name".to_owned()),
        (false, _) => Err(format!(
            "expected at most {CLIENT_NAME_BYTES_MAX} letters, digits, `-`, `_`, `.` and `@`"
        )),
    }
}

/// Makes the certificates that `command` requests.
pub(super) fn run(command: CertCommand) -> anyhow::Result<ExitCode> {
    let made = match command {
        CertCommand::Ca(args) => ca(&args)?,
        CertCommand::Node(args) => nodes(&args)?,
        CertCommand::Client(args) => client(&args)?,
    };
    let lines: String = made
        .iter()
        .map(|file| format!("{}\n", file.display()))
        .collect();
    print(lines)?;
    Ok(ExitCode::SUCCESS)
}

fn ca(args: &CaArgs) -> anyhow::Result<Vec<PathBuf>> {
    // A random suffix distinguishes an authority from its successor.
    let name = format!("{} CA {:08x}", args.cluster, rand::random::<u32>());
    let mut params = params(&name, args.days);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    write(&args.out, CA, &certificate, &key)
}

fn nodes(args: &NodeArgs) -> anyhow::Result<Vec<PathBuf>> {
    let signed = &args.signed;
    let issuer = signed.issuer()?;
    let mut made = Vec::new();
    for ReplicaHosts { id, hosts } in &args.replica {
        let name = format!("replica-{id}");
        let mut params = params(&name, signed.days);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let for_peers = raft::certificate_names(&signed.cluster, *id);
        let own = OWN_HOST.map(str::to_owned);
        let names = for_peers.iter().chain(hosts).chain(&own);
        params.subject_alt_names = names.map(|name| san(name)).collect::<Result<_, _>>()?;
        made.extend(signed.sign(&name, &params, &issuer)?);
    }
    Ok(made)
}

fn client(args: &ClientArgs) -> anyhow::Result<Vec<PathBuf>> {
    let signed = &args.signed;
    let mut params = params(&args.name, signed.days);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if let Some(role) = args.role {
        params.subject_alt_names = vec![san(&role_name(&signed.cluster, role))?];
    }
    signed.sign(&args.name, &params, &signed.issuer()?)
}

impl SignedArgs {
    /// Reads the authority's certificate and key.
    fn issuer(&self) -> anyhow::Result<Issuer<'static, KeyPair>> {
        let folder = self.ca.as_ref().unwrap_or(&self.out);
        let read = |extension: &str| {
            let file = folder.join(CA).with_extension(extension);
            let hint = "`quorate cert ca` makes one; --ca names its folder";
            let text = std::fs::read_to_string(&file);
            text.with_context(|| format!("read {}: {hint}", file.display()))
        };
        let (certificate, key) = (read("crt")?, read("key")?);
        let folder = folder.display();
        let key = KeyPair::from_pem(&key).with_context(|| format!("read {folder}/ca.key"))?;
        Issuer::from_ca_cert_pem(&certificate, key).with_context(|| format!("read {folder}/ca.crt"))
    }

    fn sign(
        &self,
        name: &str,
        params: &CertificateParams,
        issuer: &Issuer<'_, KeyPair>,
    ) -> anyhow::Result<Vec<PathBuf>> {
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, issuer)?;
        write(&self.out, name, &certificate, &key)
    }
}

fn params(name: &str, days: u32) -> CertificateParams {
    let mut params = CertificateParams::default();
    let now = OffsetDateTime::now_utc();
    params.not_before = now - BACKDATED;
    params.not_after = now + Duration::days(days.into());
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.use_authority_key_identifier_extension = true;
    params
}

fn san(name: &str) -> anyhow::Result<SanType> {
    match name.parse::<IpAddr>() {
        Ok(address) => Ok(SanType::IpAddress(address)),
        Err(_) => Ok(SanType::DnsName(name.try_into()?)),
    }
}

/// Writes a certificate and its key. Fails if either file exists.
fn write(
    folder: &Path,
    name: &str,
    certificate: &Certificate,
    key: &KeyPair,
) -> anyhow::Result<Vec<PathBuf>> {
    private_folder(folder).with_context(|| format!("make folder {}", folder.display()))?;
    let file = |extension: &str| folder.join(format!("{name}.{extension}"));
    let (certificate_file, key_file) = (file("crt"), file("key"));
    for file in [&certificate_file, &key_file] {
        let exists = file.exists();
        ensure!(!exists, "{} exists; move it away first", file.display());
    }
    let create = |file: &Path, mode: u32, text: String| {
        let mut options = OpenOptions::new();
        let options = options.write(true).create_new(true).mode(mode);
        let written = options
            .open(file)
            .and_then(|mut open| open.write_all(text.as_bytes()));
        written.with_context(|| format!("write {}", file.display()))
    };
    create(&key_file, 0o600, key.serialize_pem())?;
    create(&certificate_file, 0o644, certificate.pem())?;
    Ok(vec![certificate_file, key_file])
}
