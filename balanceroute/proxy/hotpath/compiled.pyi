from balanceroute.proxy.hotpath.reference import EventMatcher as EventMatcher
from balanceroute.proxy.hotpath.reference import unchunked as unchunked
