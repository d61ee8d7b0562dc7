// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IPv6 addresses for guests that ask for one (DHCPv6, RFC 8415): the answers to their messages.
//!
//! As with [DHCPv4](super::dhcp), each MAC has one address, from the configuration, so there is no state. A client asks from
//! its link-local address and by multicast; a request to another server, or through a relay, gets no answer.

use std::net::Ipv6Addr;

use super::Lease;
use super::ipv6::Ipv6Config;
use crate::frames::frame::Mac;
use crate::frames::headers::get;

/// Bytes of a UDP header.
const UDP: usize = 8;
const CLIENT_PORT: u16 = 546;
const SERVER_PORT: u16 = 547;
/// Valid and preferred lifetime of an address, and when the client is to renew and to rebind it, in seconds.
const VALID: u32 = 7200;
const PREFERRED: u32 = 3600;
const RENEW: u32 = 1800;
const REBIND: u32 = 2880;
/// The largest number of associations of one message that are answered, and of addresses of each that are released: an
/// answer fits into one frame.
const MAX_ASSOCIATIONS: usize = 4;
/// Longest identifier of a client (RFC 8415 §11.1).
const MAX_DUID: usize = 130;

/// Types of messages.
mod kind {
    pub const SOLICIT: u8 = 1;
    pub const ADVERTISE: u8 = 2;
    pub const REQUEST: u8 = 3;
    pub const CONFIRM: u8 = 4;
    pub const RENEW: u8 = 5;
    pub const REBIND: u8 = 6;
    pub const REPLY: u8 = 7;
    pub const RELEASE: u8 = 8;
    pub const DECLINE: u8 = 9;
    pub const INFORMATION: u8 = 11;
}

/// Numbers of options.
mod option {
    pub const CLIENT: u16 = 1;
    pub const SERVER: u16 = 2;
    pub const ASSOCIATION: u16 = 3;
    pub const ADDRESS: u16 = 5;
    pub const STATUS: u16 = 13;
    pub const RAPID_COMMIT: u16 = 14;
    pub const DNS: u16 = 23;
    pub const PREFIXES: u16 = 25;
}

/// Codes of status options.
mod status {
    pub const SUCCESS: u16 = 0;
    pub const NO_ADDRESS: u16 = 2;
    pub const NOT_ON_LINK: u16 = 4;
    pub const NO_PREFIX: u16 = 6;
}

/// Returns the options of a message, up to the first that is cut short.
fn options(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let number = u16::from_be_bytes(get(bytes, 0)?);
        let len = usize::from(u16::from_be_bytes(get(bytes, 2)?));
        let (value, rest) = bytes[4..].split_at_checked(len)?;
        bytes = rest;
        Some((number, value))
    })
}

fn say(to: &mut Vec<u8>, number: u16, value: &[u8]) {
    to.extend(number.to_be_bytes());
    to.extend((value.len() as u16).to_be_bytes());
    to.extend(value);
}

/// Returns the addresses in the options of an association.
fn addresses(association: &[u8]) -> impl Iterator<Item = Ipv6Addr> {
    let all = options(association.get(12..).unwrap_or_default());
    all.filter(|(number, _)| *number == option::ADDRESS)
        .filter_map(|(_, v)| get::<16>(v, 0).map(Ipv6Addr::from))
}

/// Answers the UDP datagram `asked` with a UDP datagram without its checksum, from the owner of `server` to the client with
/// `lease`.
#[must_use]
pub fn answer(config: &Ipv6Config, server: Mac, asked: &[u8], lease: &Lease<Ipv6Addr>) -> Option<Vec<u8>> {
    let port = |at| get(asked, at).map(u16::from_be_bytes);
    let len = usize::from(port(4)?);
    if port(0)? != CLIENT_PORT || port(2)? != SERVER_PORT {
        return None;
    }
    let message = asked.get(UDP..len)?;
    let (&[kind, ref exchange @ ..], rest) = message.split_first_chunk::<4>()?;
    let find = |wanted| options(rest).find(|(number, _)| *number == wanted).map(|(_, value)| value);
    // DUID-LL of Ethernet (RFC 8415 §11.4).
    let own = [&[0, 3, 0, 1][..], &server.0].concat();
    let client = find(option::CLIENT);
    let named = find(option::SERVER);
    let fits = match kind {
        kind::SOLICIT | kind::CONFIRM | kind::REBIND => client.is_some() && named.is_none(),
        kind::REQUEST | kind::RENEW | kind::RELEASE | kind::DECLINE => {
            client.is_some() && named == Some(&own)
        }
        kind::INFORMATION => named.is_none_or(|n| n == own) && find(option::ASSOCIATION).is_none(),
        _ => false,
    };
    if !fits || client.is_some_and(|c| c.len() > MAX_DUID) {
        return None;
    }
    let rapid = kind == kind::SOLICIT && find(option::RAPID_COMMIT).is_some();
    let mut reply = vec![if kind == kind::SOLICIT && !rapid { kind::ADVERTISE } else { kind::REPLY }];
    reply.extend(exchange);
    say(&mut reply, option::SERVER, &own);
    if let Some(client) = client {
        say(&mut reply, option::CLIENT, client);
    }
    if rapid {
        say(&mut reply, option::RAPID_COMMIT, &[]);
    }
    let associations = || options(rest).filter(|(n, _)| *n == option::ASSOCIATION).map(|(_, v)| v);
    match kind {
        kind::CONFIRM => {
            // A client that sends no address gets no answer (RFC 8415 §18.3.3).
            associations().flat_map(addresses).next()?;
            let all = associations().flat_map(addresses).all(|ip| config.prefix.has(ip));
            let code = if all { status::SUCCESS } else { status::NOT_ON_LINK };
            say(&mut reply, option::STATUS, &code.to_be_bytes());
        }
        kind::RELEASE | kind::DECLINE => say(&mut reply, option::STATUS, &status::SUCCESS.to_be_bytes()),
        kind::INFORMATION => {}
        _ => {
            for (n, association) in associations().take(MAX_ASSOCIATIONS).enumerate() {
                give(&mut reply, association, (n == 0).then_some(lease.address));
            }
            refuse_prefixes(&mut reply, find(option::PREFIXES));
        }
    }
    if !config.dns.is_empty() {
        let dns: Vec<u8> = config.dns.iter().flat_map(Ipv6Addr::octets).collect();
        say(&mut reply, option::DNS, &dns);
    }
    let len = ((UDP + reply.len()) as u16).to_be_bytes();
    Some([&SERVER_PORT.to_be_bytes()[..], &CLIENT_PORT.to_be_bytes(), &len, &[0; 2], &reply].concat())
}

/// Answers a request for prefixes, of which there are none.
fn refuse_prefixes(reply: &mut Vec<u8>, asked: Option<&[u8]>) {
    let Some(delegation) = asked.and_then(|value| value.first_chunk::<4>()) else { return };
    let mut refusal = [&delegation[..], &[0; 8]].concat();
    say(&mut refusal, option::STATUS, &status::NO_PREFIX.to_be_bytes());
    say(reply, option::PREFIXES, &refusal);
}

/// Answers an association: the first one gets the address; other addresses that it has become invalid.
fn give(reply: &mut Vec<u8>, association: &[u8], address: Option<Ipv6Addr>) {
    let Some(id) = association.first_chunk::<4>() else { return };
    let mut value = id.to_vec();
    let times = if address.is_some() { [RENEW, REBIND] } else { [0, 0] };
    times.iter().for_each(|t| value.extend(t.to_be_bytes()));
    let mut lifetimes = |ip: Ipv6Addr, [preferred, valid]: [u32; 2]| {
        let parts = [&ip.octets()[..], &preferred.to_be_bytes(), &valid.to_be_bytes()];
        say(&mut value, option::ADDRESS, &parts.concat());
    };
    if let Some(ip) = address {
        lifetimes(ip, [PREFERRED, VALID]);
    }
    for ip in addresses(association).filter(|ip| Some(*ip) != address).take(MAX_ASSOCIATIONS) {
        lifetimes(ip, [0, 0]);
    }
    if address.is_none() {
        say(&mut value, option::STATUS, &status::NO_ADDRESS.to_be_bytes());
    }
    say(reply, option::ASSOCIATION, &value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SERVER: Mac = Mac([6, 0x54, 0, 0, 0, 1]);
    const OWN: [u8; 10] = [0, 3, 0, 1, 6, 0x54, 0, 0, 0, 1];

    fn config() -> Ipv6Config {
        serde_json::from_str(r#"{ "prefix": "fd00::/64", "managed": true, "dns": ["fd00::53"] }"#).unwrap()
    }

    fn lease() -> Lease<Ipv6Addr> {
        Lease { address: "fd00::5".parse().unwrap(), name: "web".into() }
    }

    fn with(number: u16, value: &[u8]) -> Vec<u8> {
        let mut all = Vec::new();
        say(&mut all, number, value);
        all
    }

    fn association(id: u32, addresses: &[&str]) -> Vec<u8> {
        let mut value = [&id.to_be_bytes()[..], &[0; 8]].concat();
        for ip in addresses {
            let address = [&ip.parse::<Ipv6Addr>().unwrap().octets()[..], &[0; 8]].concat();
            say(&mut value, option::ADDRESS, &address);
        }
        with(option::ASSOCIATION, &value)
    }

    fn ask(kind: u8, more: &[Vec<u8>]) -> Option<(u8, Vec<u8>)> {
        let mut message = vec![kind, 7, 8, 9];
        message.extend(with(option::CLIENT, &[1, 2, 3]));
        message.extend(more.concat());
        let mut asked = [546u16.to_be_bytes(), 547u16.to_be_bytes()].concat();
        asked.extend(((message.len() + UDP) as u16).to_be_bytes());
        asked.extend([0, 0]);
        asked.extend(message);
        let reply = answer(&config(), SERVER, &asked, &lease())?;
        assert_eq!(reply[..4], [547u16.to_be_bytes(), 546u16.to_be_bytes()].concat());
        assert_eq!(usize::from(u16::from_be_bytes([reply[4], reply[5]])), reply.len());
        assert_eq!(reply[9..12], [7, 8, 9]);
        Some((reply[8], reply[12..].to_vec()))
    }

    fn find(reply: &[u8], number: u16) -> Option<Vec<u8>> {
        options(reply).find(|(n, _)| *n == number).map(|(_, v)| v.to_vec())
    }

    /// Returns the addresses of the first association, with their lifetimes.
    fn given(reply: &[u8]) -> Vec<(String, u32)> {
        let association = find(reply, option::ASSOCIATION).unwrap();
        let all = options(&association[12..]).filter(|(n, _)| *n == option::ADDRESS);
        all.map(|(_, v)| {
            let ip = Ipv6Addr::from(get::<16>(v, 0).unwrap()).to_string();
            (ip, u32::from_be_bytes(get(v, 20).unwrap()))
        })
        .collect()
    }

    #[test]
    fn a_guest_is_offered_its_address_and_gets_it() {
        let own = ("fd00::5".to_owned(), VALID);
        let (kind, offer) = ask(1, &[association(9, &[])]).unwrap();
        assert_eq!((kind, given(&offer)), (kind::ADVERTISE, vec![own.clone()]));
        assert_eq!(find(&offer, option::SERVER).unwrap(), OWN);
        assert_eq!(find(&offer, option::CLIENT).unwrap(), [1, 2, 3]);
        assert_eq!(find(&offer, option::DNS).unwrap(), config().dns[0].octets());
        let (kind, reply) = ask(1, &[association(9, &[]), with(option::RAPID_COMMIT, &[])]).unwrap();
        assert_eq!((kind, given(&reply)), (kind::REPLY, vec![own.clone()]));
        for kind in [3, 5] {
            let (kind, reply) = ask(kind, &[with(option::SERVER, &OWN), association(9, &[])]).unwrap();
            assert_eq!((kind, given(&reply)), (kind::REPLY, vec![own.clone()]));
        }
        // An address that it had before becomes invalid.
        let (_, reply) = ask(6, &[association(9, &["fd00::66"])]).unwrap();
        assert_eq!(given(&reply), [own, ("fd00::66".to_owned(), 0)]);
    }

    #[test]
    fn what_is_not_this_servers_gets_no_answer_and_what_it_has_not_is_refused() {
        let other = with(option::SERVER, &[0, 3, 0, 1, 9, 9, 9, 9, 9, 9]);
        assert_eq!(ask(3, &[other, association(9, &[])]), None);
        assert_eq!(ask(3, &[association(9, &[])]), None, "a request that names no server");
        assert_eq!(ask(1, &[with(option::SERVER, &OWN)]), None);
        assert_eq!(ask(12, &[]), None, "a relay");
        let status = |reply: &[u8]| find(reply, option::STATUS).map(|v| v[1]);
        assert_eq!(status(&ask(4, &[association(9, &["fd00::5"])]).unwrap().1), Some(0));
        assert_eq!(status(&ask(4, &[association(9, &["fd01::5"])]).unwrap().1), Some(4));
        assert_eq!(ask(4, &[association(9, &[])]), None);
        assert_eq!(status(&ask(8, &[with(option::SERVER, &OWN)]).unwrap().1), Some(0));
        let (kind, information) = ask(11, &[]).unwrap();
        assert_eq!((kind, find(&information, option::ASSOCIATION)), (kind::REPLY, None));
        // The second association gets nothing, and no prefix is delegated.
        let prefixes = with(option::PREFIXES, &[0; 12]);
        let (_, offer) = ask(1, &[association(1, &[]), association(2, &[]), prefixes]).unwrap();
        let second = options(&offer).filter(|(n, _)| *n == option::ASSOCIATION).nth(1).unwrap().1;
        assert_eq!(find(&second[12..], option::STATUS).unwrap(), [0, 2]);
        let refused = find(&offer, option::PREFIXES).unwrap();
        assert_eq!(find(&refused[12..], option::STATUS).unwrap(), [0, 6]);
    }

    proptest! {
        #[test]
        fn any_message_gets_a_short_answer_or_none(
            kind in 0u8..14,
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
            many in 0usize..100,
            held in 0usize..60,
        ) {
            let _any = ask(kind, &[bytes]);
            let held = vec!["fd00::66"; held];
            if let Some((_, reply)) = ask(kind, &vec![association(1, &held); many]) {
                prop_assert!(reply.len() < 1400);
            }
        }
    }
}
