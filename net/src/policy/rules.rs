// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rules of a port: the IP packets that it may send or receive, by addresses, protocol and ports, without state. The first
//! rule that matches a packet decides; packets without a match pass, and so do other frames than IP.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::frames::headers::{Headers, Net, protocol};
use crate::ports::counters::Reason;

/// The effect of a rule on a packet that matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It passes.
    Allow,
    /// It is dropped, and counted.
    Drop,
}

/// The direction of packets, for the port's guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// Packets that the guest sends.
    Out,
    /// Packets that the guest receives.
    In,
}

/// A range of addresses: `10.0.0.0/24`, `fd00::/64`, or one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    address: IpAddr,
    len: u32,
}

/// Returns the bits of an address, from the most significant down, and their number.
fn bits(ip: IpAddr) -> (u128, u32) {
    match ip {
        IpAddr::V4(ip) => (u128::from(u32::from(ip)) << 96, 32),
        IpAddr::V6(ip) => (ip.into(), 128),
    }
}

impl Prefix {
    fn has(&self, ip: IpAddr) -> bool {
        let ((own, size), (other, other_size)) = (bits(self.address), bits(ip));
        size == other_size && (own ^ other).checked_shr(128 - self.len).unwrap_or(0) == 0
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("'{text}' is no range of addresses; write one like 10.0.0.0/24 or fd00::/64");
        let (address, len) = text.split_once('/').map_or((text, None), |(a, l)| (a, Some(l)));
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let (_, size) = bits(address);
        let len = len.map_or(Ok(size), str::parse).map_err(|_| bad())?;
        if len > size { Err(bad()) } else { Ok(Self { address, len }) }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.len)
    }
}

/// A range of ports: `80` or `1024-2047`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ports(RangeInclusive<u16>);

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("'{text}' is no range of ports; write 80, or one like \"1024-2047\"");
        let (from, to) = text.split_once('-').unwrap_or((text, text));
        let (from, to) = (from.parse().map_err(|_| bad())?, to.parse().map_err(|_| bad())?);
        if from > to { Err(bad()) } else { Ok(Self(from..=to)) }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = (self.0.start(), self.0.end());
        if from == to { write!(f, "{from}") } else { write!(f, "{from}-{to}") }
    }
}

/// An IP protocol: `tcp`, `udp`, `icmp`, `icmpv6`, `sctp`, or its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol(u8);

const NAMES: [(&str, u8); 5] = [
    ("tcp", protocol::TCP),
    ("udp", protocol::UDP),
    ("icmp", protocol::ICMP),
    ("icmpv6", protocol::ICMPV6),
    ("sctp", protocol::SCTP),
];

impl FromStr for Protocol {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match NAMES.iter().find(|(name, _)| *name == text) {
            Some((_, number)) => Ok(Self(*number)),
            None => text.parse().map(Self).map_err(|_| {
                format!("'{text}' is no protocol; write tcp, udp, icmp, icmpv6, sctp or a number")
            }),
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.iter().find(|(_, number)| *number == self.0) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Serializes as text, and reads text or a number by [`FromStr`].
macro_rules! as_text {
    ($($name:ident),+) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                #[derive(Deserialize)]
                #[serde(untagged)]
                enum Written { Number(u16), Text(String) }
                let text = match Written::deserialize(d)? {
                    Written::Number(n) => n.to_string(),
                    Written::Text(text) => text,
                };
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    )+};
}
as_text!(Prefix, Ports, Protocol);

/// Frames that a rule has decided; shared by the copies of a rule.
#[derive(Clone, Debug, Default)]
pub struct Hits(Arc<AtomicU64>);

impl Hits {
    /// Returns the present number.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl PartialEq for Hits {
    /// Rules are equal whatever their counts are.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Hits {}

/// A rule. A missing field matches every packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rule {
    /// Allow or drop.
    pub action: Action,
    /// Packets that the guest sends, or gets.
    pub direction: Way,
    /// IP protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Source addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Prefix>,
    /// Destination addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination: Option<Prefix>,
    /// Source ports; doesn't match packets without ports, for example later fragments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_port: Option<Ports>,
    /// Destination ports; doesn't match packets without ports, for example later fragments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination_port: Option<Ports>,
    /// Frames that it has decided.
    #[serde(skip)]
    pub hits: Hits,
}

impl fmt::Display for Rule {
    /// Formats the rule in one line, as in metrics.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let action = if self.action == Action::Allow { "allow" } else { "drop" };
        write!(f, "{action} {}", if self.direction == Way::Out { "out" } else { "in" })?;
        if let Some(protocol) = self.protocol {
            write!(f, " {protocol}")?;
        }
        for (word, prefix, ports) in
            [("from", &self.source, &self.source_port), ("to", &self.destination, &self.destination_port)]
        {
            match (prefix, ports) {
                (None, None) => {}
                (Some(prefix), None) => write!(f, " {word} {prefix}")?,
                (None, Some(ports)) => write!(f, " {word} port {ports}")?,
                (Some(prefix), Some(ports)) => write!(f, " {word} {prefix} port {ports}")?,
            }
        }
        Ok(())
    }
}

/// The fields that rules compare.
struct Packet {
    protocol: u8,
    source: IpAddr,
    destination: IpAddr,
    ports: Option<(u16, u16)>,
}

impl Packet {
    /// None: the packet is incomplete.
    fn read(headers: &Headers, head: &[u8]) -> Option<Self> {
        let (source, destination) = headers.addresses(head)?;
        let ports = headers.ports(head);
        (!headers.lacks_ports(head)).then_some(Self {
            protocol: headers.protocol,
            source,
            destination,
            ports,
        })
    }
}

impl Rule {
    fn fits(&self, p: &Packet) -> bool {
        let port = |wanted: &Option<Ports>, number: Option<u16>| {
            wanted.as_ref().is_none_or(|w| number.is_some_and(|n| w.0.contains(&n)))
        };
        self.protocol.is_none_or(|w| w.0 == p.protocol)
            && self.source.is_none_or(|w| w.has(p.source))
            && self.destination.is_none_or(|w| w.has(p.destination))
            && port(&self.source_port, p.ports.map(|p| p.0))
            && port(&self.destination_port, p.ports.map(|p| p.1))
    }
}

/// The rules' decision about a frame.
#[derive(Clone, Copy, Default)]
pub struct Decision<'a> {
    rule: Option<&'a Rule>,
    drop: Option<Reason>,
}

impl Decision<'_> {
    /// Counts the rule that decided; called once per frame. Returns the reason for dropping it, if any.
    pub fn count(self) -> Option<Reason> {
        if let Some(rule) = self.rule {
            rule.hits.0.fetch_add(1, Ordering::Relaxed);
        }
        self.drop
    }

    /// Returns whether the frame passes.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.drop.is_none()
    }
}

/// Decides about a frame with these `headers` that starts with `head`. If the direction has rules, unparsable frames don't
/// pass.
#[must_use]
pub fn decide<'a>(rules: &'a [Rule], direction: Way, headers: &Headers, head: &[u8]) -> Decision<'a> {
    let mut rules = rules.iter().filter(|r| r.direction == direction).peekable();
    if rules.peek().is_none() || matches!(headers.net, Net::Arp | Net::Other(_)) {
        return Decision::default();
    }
    let readable = headers.net != Net::Unknown;
    let Some(packet) = readable.then(|| Packet::read(headers, head)).flatten() else {
        return Decision { rule: None, drop: Some(Reason::Unparsable) };
    };
    let rule = rules.find(|r| r.fits(&packet));
    let drop = rule.filter(|r| r.action == Action::Drop).map(|_| Reason::Rule);
    Decision { rule, drop }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Vec<Rule> {
        #[derive(Deserialize)]
        struct All {
            rules: Vec<Rule>,
        }
        toml::from_str::<All>(text).unwrap().rules
    }

    fn udp(source: [u8; 4], destination: [u8; 4], ports: (u16, u16), fragment: u16) -> Vec<u8> {
        let mut f = vec![0; 12];
        f.extend([8, 0, 0x45, 0, 0, 28, 0, 1]);
        f.extend(fragment.to_be_bytes());
        f.extend([64, 17, 0, 0]);
        f.extend(source);
        f.extend(destination);
        f.extend(ports.0.to_be_bytes());
        f.extend(ports.1.to_be_bytes());
        f.extend([0, 8, 0, 0]);
        f
    }

    fn judge(rules: &[Rule], direction: Way, f: &[u8]) -> Result<(), Reason> {
        decide(rules, direction, &Headers::parse(f, f.len() as u32), f).count().map_or(Ok(()), Err)
    }

    #[test]
    fn the_first_rule_that_fits_decides_and_is_counted() {
        let rules = rules(
            "rules = [
                { action = 'allow', direction = 'out', protocol = 'udp', destination = '10.0.0.0/24', destination-port = 53 },
                { action = 'drop', direction = 'out', protocol = 17, destination-port = '1-1023' },
                { action = 'drop', direction = 'in', source = '10.0.1.7' },
            ]",
        );
        let (own, dns) = ([10, 0, 1, 1], [10, 0, 0, 9]);
        let drop = Err(Reason::Rule);
        assert_eq!(judge(&rules, Way::Out, &udp(own, dns, (5000, 53), 0)), Ok(()));
        assert_eq!(judge(&rules, Way::Out, &udp(own, [10, 0, 2, 9], (5000, 53), 0)), drop);
        assert_eq!(judge(&rules, Way::Out, &udp(own, dns, (5000, 1024), 0)), Ok(()));
        assert_eq!(judge(&rules, Way::In, &udp([10, 0, 1, 7], own, (1, 1), 0)), drop);
        assert_eq!(judge(&rules, Way::In, &udp([10, 0, 1, 8], own, (1, 1), 0)), Ok(()));
        assert_eq!(rules.iter().map(|r| r.hits.get()).collect::<Vec<_>>(), [1, 1, 1]);
        let named: Vec<_> = rules.iter().map(ToString::to_string).collect();
        assert_eq!(
            named,
            [
                "allow out udp to 10.0.0.0/24 port 53",
                "drop out udp to port 1-1023",
                "drop in from 10.0.1.7/32"
            ]
        );
    }

    #[test]
    fn fragments_have_ports_only_in_front_and_what_cannot_be_read_does_not_pass() {
        let rules = rules("rules = [{ action = 'drop', direction = 'out', destination-port = 53 }]");
        let (a, b) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        assert_eq!(judge(&rules, Way::Out, &udp(a, b, (1, 53), 0x2000)), Err(Reason::Rule), "the first");
        assert_eq!(judge(&rules, Way::Out, &udp(a, b, (1, 53), 1)), Ok(()), "a later one, useless alone");
        let mut tiny = udp(a, b, (1, 53), 0x2000);
        tiny[17] = 22;
        assert_eq!(judge(&rules, Way::Out, &tiny), Err(Reason::Unparsable), "a first one without its ports");
        assert_eq!(
            judge(&rules, Way::Out, &[&[0; 12][..], &[0, 40], &[0; 46]].concat()),
            Err(Reason::Unparsable)
        );
        let arp = [&[0; 12][..], &[8, 6, 0, 1, 8, 0, 6, 4], &[0; 40]].concat();
        assert_eq!(judge(&rules, Way::Out, &arp), Ok(()));
        assert_eq!(judge(&rules, Way::In, &[0; 60]), Ok(()), "no rule looks there");
    }

    #[test]
    fn ranges_are_read_and_what_is_none_is_named() {
        let has = |prefix: &str, ip: &str| prefix.parse::<Prefix>().unwrap().has(ip.parse().unwrap());
        assert!(has("10.0.0.0/24", "10.0.0.255") && !has("10.0.0.0/24", "10.0.1.0"));
        assert!(has("0.0.0.0/0", "9.9.9.9") && !has("0.0.0.0/0", "::"));
        assert!(has("fd00::/64", "fd00::1:2:3:4") && !has("fd00::/64", "fd00:0:0:1::1"));
        assert!(has("::/0", "fe80::1") && has("10.0.0.1", "10.0.0.1") && !has("10.0.0.1", "10.0.0.0"));
        for bad in ["10.0.0.0/33", "10.0.0/8", "x"] {
            assert!(bad.parse::<Prefix>().unwrap_err().contains(bad));
        }
        assert!("9-1".parse::<Ports>().is_err() && "70000".parse::<Ports>().is_err());
        assert!("tpc".parse::<Protocol>().unwrap_err().contains("icmpv6"));
    }
}
